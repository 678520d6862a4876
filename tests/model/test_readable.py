"""Why a model cannot read a batch: told where the batch is why, and left as it is where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import BatchError


class Reading(nn.Module):
    """Embeds ids, and fails in its own way if it is told to."""

    def __init__(self, problem: Exception | None = None) -> None:
        super().__init__()
        self.table, self.places, self.problem = nn.Embedding(9, 3), nn.Embedding(4, 3), problem

    def forward(self, ids: Tensor) -> Tensor:
        if self.problem is not None:
            raise self.problem
        return (self.table(ids) + self.places(torch.arange(ids.shape[1]))).sum(1)


@pytest.mark.parametrize("ids", [torch.tensor([[1, 9]]), torch.tensor([[-1, 2]]), torch.ones(1, 5, dtype=torch.long)])
def test_ids_outside_of_a_table_of_the_users_own(ids: Tensor) -> None:
    with pytest.raises(BatchError, match=r"integers go from .* the tables of Reading have 9, 4 rows") as caught:
        gr.saliency(Reading(), ids, gr.all_logits(), gr.Activations("table"))
    assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize(
    "problem",
    [IndexError("list index out of range"), RuntimeError("mine"), KeyError("x"), torch.OutOfMemoryError("full")],
)
def test_errors_of_the_models_own_code_are_passed_on(problem: Exception) -> None:
    with pytest.raises(type(problem)) as caught:
        gr.saliency(Reading(problem), torch.ones(1, 5, dtype=torch.long), gr.all_logits(), gr.Activations("table"))
    assert caught.value is problem


def test_ids_beside_pictures_may_stand_for_them() -> None:
    """A model that replaces ids outside of its table itself."""
    transformers = pytest.importorskip("transformers")

    class Seeing(transformers.BertModel):  # type: ignore[misc, name-defined]  # known when transformers is there
        def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
            return super().forward(input_ids.clamp(max=9)).pooler_output + pixel_values.mean((1, 2, 3))[:, None]

    config = transformers.BertConfig(
        vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    net, ids = Seeing(config).eval(), torch.tensor([[1, 2, 50]])
    batch = {"input_ids": ids, "pixel_values": torch.ones(1, 3, 2, 2)}
    found = gr.gradients(net, batch, lambda outputs, batch: outputs[:, 0], gr.Inputs("pixel_values"))
    assert bool((found["pixel_values"] - 1 / 12).abs().max() < 1e-6)
    with pytest.raises(BatchError, match="holds the token 50"):
        gr.gradients(transformers.BertModel(config), {"input_ids": ids}, gr.all_logits(), gr.Embeddings())
