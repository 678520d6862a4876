"""Linear layers and layer normalization in forward mode: the numbers are those of torch, whichever arguments move."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp, vmap

import gradreg as gr
from gradreg.engine._tangent_rules import TangentRules

NAMES = ("input", "weight", "bias")
MOVED = [names for count in (1, 2, 3) for names in itertools.combinations(NAMES, count)]


@pytest.mark.parametrize("moved", MOVED, ids="+".join)
@pytest.mark.parametrize("leading", [(), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_tangents(moved: tuple[str, ...], leading: tuple[int, ...], with_bias: bool) -> None:
    torch.manual_seed(0)
    values = {
        "input": torch.randn(*leading, 3, dtype=torch.float64),
        "weight": torch.randn(5, 3, dtype=torch.float64),
        "bias": torch.randn(5, dtype=torch.float64),
    }
    moved = tuple(name for name in moved if with_bias or name != "bias")
    if not moved:
        return
    rest = {name: value for name, value in values.items() if name not in moved and (with_bias or name != "bias")}
    tangents = tuple(torch.randn(2, *values[name].shape, dtype=torch.float64) for name in moved)

    def along(*tangent: Tensor) -> tuple[Tensor, Tensor]:
        def function(*given: Tensor) -> Tensor:
            return F.linear(**rest, **dict(zip(moved, given, strict=True)))

        return jvp(function, tuple(values[name] for name in moved), tangent)

    right = vmap(along)(*tangents)
    with TangentRules():
        found = vmap(along)(*tangents)
        single = along(*(tangent[0] for tangent in tangents))
    for one, two in zip(found, right, strict=True):
        assert torch.allclose(one, two, atol=1e-14)
    assert torch.allclose(single[1], right[1][0], atol=1e-14)


@pytest.mark.parametrize("moved", MOVED, ids="+".join)
@pytest.mark.parametrize("leading", [(4,), (2, 3)], ids=str)
def test_tangents_of_layer_normalization(moved: tuple[str, ...], leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = {"input": 3 + torch.randn(*leading, 5, dtype=torch.float64)}
    values |= {name: torch.randn(5, dtype=torch.float64) for name in ("weight", "bias")}
    rest = {name: value for name, value in values.items() if name not in moved}
    tangents = tuple(torch.randn(2, *values[name].shape, dtype=torch.float64) for name in moved)

    def along(*tangent: Tensor) -> tuple[Tensor, Tensor]:
        def function(*given: Tensor) -> Tensor:
            return F.layer_norm(normalized_shape=(5,), eps=1e-3, **rest, **dict(zip(moved, given, strict=True)))

        return jvp(function, tuple(values[name] for name in moved), tangent)

    right = vmap(along)(*tangents)
    with TangentRules():
        found = vmap(along)(*tangents)
    for one, two in zip(found, right, strict=True):
        assert torch.allclose(one, two, atol=1e-13)


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(3, elementwise_affine=False),
        nn.LayerNorm(3, bias=False),
        nn.LayerNorm((2, 3)),
        nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2), nn.LayerNorm(2)),
    ],
    ids=["plain", "no bias", "two axes", "several"],
)
def test_layers_in_a_model(layer: nn.Module) -> None:
    model, x = nn.Sequential(layer, nn.Flatten()).double(), torch.randn(4, 2, 3, dtype=torch.float64)
    directions = torch.randn(3, 4, 2, 3, dtype=torch.float64)
    found = gr.directional(model, x, gr.all_logits(), gr.Inputs(), directions, route="forward")
    right = gr.directional(model, x, gr.all_logits(), gr.Inputs(), directions, route="reverse")
    assert torch.allclose(found, right, atol=1e-12)


class Hyper(nn.Module):
    """A linear layer whose weight depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.biases = nn.Linear(3, 6).double(), nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        rows = [F.linear(row.tanh(), self.weights(row).view(2, 3), self.biases(row)) for row in x]
        return torch.stack(rows)


def test_weights_that_depend_on_the_input() -> None:
    model, x = Hyper(), torch.randn(4, 3, dtype=torch.float64)
    directions = torch.randn(2, 4, 3, dtype=torch.float64)
    found = gr.directional(model, x, gr.all_logits(), gr.Inputs(), directions, route="forward")
    right = gr.directional(model, x, gr.all_logits(), gr.Inputs(), directions, route="reverse")
    assert torch.allclose(found, right, atol=1e-13)


def test_unknown_routes_are_refused() -> None:
    with pytest.raises(gr.GradregError, match="route="):
        gr.directional(
            nn.Linear(3, 2), torch.zeros(1, 3), gr.logit(0), gr.Inputs(), torch.zeros(1, 1, 3), route="sideways"
        )


def test_forward_mode_by_name_is_not_replaced() -> None:
    x, directions = torch.zeros(1, 3), torch.zeros(1, 1, 3)
    with pytest.raises(gr.errors.RouteError, match="reverse"):
        gr.directional(nn.Linear(3, 2), x, gr.logit(0), gr.Inputs(), directions, differentiable=True, route="forward")
