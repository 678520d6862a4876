"""Calls in a row keep nothing: T27, a leak that other libraries had through hooks and graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import gradreg as gr

pytest.importorskip("transformers")

from tests.attribution.attribution_models import bert, tokens

NET, BATCH, EMBEDDINGS = bert(2, layers=1), tokens([2, 3]), gr.Embeddings()


def first(outputs: Any, batch: gr.Batch) -> Tensor:
    return outputs.logits[:, 0]


CALLS: dict[str, Callable[[], Any]] = {
    "forward mode": lambda: gr.integrated_gradients(
        NET, BATCH, first, EMBEDDINGS, baseline=gr.token_baseline(5), n_steps=2, tolerance=1.0, route="forward"
    ),
    "reverse mode": lambda: gr.integrated_gradients(
        NET, BATCH, first, EMBEDDINGS, baseline=gr.mean_embedding(), n_steps=2, tolerance=1.0, route="reverse"
    ),
    "a graph that is dropped": lambda: gr.input_x_gradient(NET, BATCH, first, EMBEDDINGS, differentiable=True),
    "saliency at maps": lambda: gr.saliency(NET, BATCH, first, gr.AttentionMaps(), per="feature"),
    "attention_report": lambda: gr.attention_report(NET, BATCH, first),
    "explain_similarity": lambda: gr.explain_similarity(
        NET,
        *(
            {name: value[i : i + 1] for name, value in {**BATCH, "labels": BATCH["input_ids"] % 2}.items()}
            for i in (0, 1)
        ),
    ),
}


def alive() -> tuple[int, int]:
    """Tensors, and the bytes that they hold."""
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    return len(found), sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


@pytest.mark.parametrize("name", CALLS)
def test_t27_a_hundred_calls_keep_nothing(name: str) -> None:
    call = CALLS[name]
    for _ in range(2):
        call()  # what is learned of the model once
    gc.collect()
    before = alive()
    gc.disable()  # what only the collector would find is kept for long, too
    try:
        for _ in range(100 if name != "explain_similarity" else 10):
            call()
        after = alive()
    finally:
        gc.enable()
    assert after == before
