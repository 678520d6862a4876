"""Row 32 of the bug table, and language models with padding, against the loop over sequences without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from tests.tracin.toy import assert_scores, made

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}


def rows(labels: str) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    found = []
    for number, length in enumerate((5, 9, 7)):
        ids = torch.randint(1, 50, (length,), generator=generator).tolist()
        given = {"tokens": ids, "class": number, "answer": ids[: 3 + number]}[labels]
        found.append({"input_ids": ids, "attention_mask": [1] * length, "labels": given})
    return found


def gpt2() -> nn.Module:
    """With its default attention, which vmap refuses."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, **SIZES)
    )


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50, num_labels=3
    )
    return transformers.BertForSequenceClassification(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=50, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def next_token_loss(model: nn.Module, row: dict[str, Any]) -> Tensor:
    ids = torch.tensor([row["input_ids"]])
    return F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum")


def class_loss(model: nn.Module, row: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(input_ids=torch.tensor([row["input_ids"]])).logits, torch.tensor([row["labels"]]))


def answer_loss(model: nn.Module, row: dict[str, Any]) -> Tensor:
    labels = torch.tensor([row["labels"]])
    logits = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).logits
    return F.cross_entropy(logits[0], labels[0], reduction="sum")


CASES: dict[str, tuple[Any, str, Any, float]] = {
    "gpt2": (gpt2, "tokens", next_token_loss, 1e-10),
    "bert": (bert, "class", class_loss, 1e-10),
    "t5": (t5, "answer", answer_loss, 1e-5),  # it rounds to float32 inside
}


@pytest.mark.parametrize("name", CASES)
def test_padded_rows_are_each_alone(name: str) -> None:
    build, labels, loss, tolerance = CASES[name]
    model, data = made(build).double(), rows(labels)
    parameters = list(model.eval().parameters())
    gradients = [torch.autograd.grad(loss(model, row), parameters, allow_unused=True) for row in data]
    G = torch.stack(
        [torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(own, parameters, strict=True)])
         for own in gradients]
    )  # fmt: skip
    ours = gr.TracIn(model.train(), gr.loss(F.cross_entropy), gr.Checkpoint(model.state_dict(), 1.0))
    found = ours.influence(data, data)
    assert_scores(found, G @ G.T, tolerance)
    assert_scores(ours.self_influence(data), (G * G).sum(1), tolerance)
    assert ours.coverage.fraction == 1.0
    assert all(module.training for module in model.modules())
    if labels != "class":
        for side in ("train", "test"):
            tokens = ours.influence(data, data, per="token", tokens=side)
            assert_scores(tokens.sum(2), found, tolerance)
