"""The seed case: who hears of a penalty, and when a warning says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradreg as gr
from gradreg.errors import ZeroSecondDerivativeWarning


def seed_model(activation: Callable[[], nn.Module]) -> gr.SharedBase:
    base = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return gr.SharedBase(base, [nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 3)) for _ in range(2)])


def published(model: nn.Module) -> torch.Tensor:
    return gr.regularizers.DiverseHeads.published()(model, torch.randn(7, 6))


def test_relu_heads_leave_the_base_at_exactly_zero_with_a_warning() -> None:
    model = seed_model(nn.ReLU)
    with pytest.warns(ZeroSecondDerivativeWarning, match=r"base.*heads\.0\.1 \(ReLU\).*Softplus") as caught:
        penalty = published(model)
    assert len(caught) == 1
    penalty.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.base.parameters())
    assert model.heads[0][0].weight.grad.any()


@pytest.mark.parametrize("activation", [nn.Softplus, nn.GELU, nn.SiLU, nn.ELU, nn.Tanh])
def test_smooth_heads_reach_the_base_without_a_warning(activation: Callable[[], nn.Module]) -> None:
    model = seed_model(activation)  # its base has a ReLU, which is fine
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        published(model).backward()
    assert model.base[0].weight.grad.any()


def test_linear_heads_are_disconnected_from_the_base() -> None:
    model = gr.SharedBase(nn.Linear(6, 4), [nn.Linear(4, 3) for _ in range(2)])
    with pytest.warns(ZeroSecondDerivativeWarning, match="disconnected from the base.*linear"):
        published(model)


def test_it_warns_once() -> None:
    model, penalty = seed_model(nn.ReLU), gr.regularizers.DiverseHeads()
    with pytest.warns(ZeroSecondDerivativeWarning):
        penalty(model, torch.randn(7, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        penalty(model, torch.randn(7, 6))


def test_a_frozen_base_is_no_fault() -> None:
    model = seed_model(nn.ReLU)
    model.base.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        published(model)


class InputNorm(gr.Regularizer):
    def forward(self, model: nn.Module, batch: gr.Batch) -> torch.Tensor:
        return gr.gradients(model, batch, gr.logit(0), gr.Inputs(), differentiable=True)["inputs"].square().sum()


def test_an_input_gradient_penalty_through_relu_is_fine() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InputNorm()(net, torch.randn(7, 6)).backward()
    assert net[0].weight.grad.any()


def test_it_leaves_no_trace() -> None:
    model = seed_model(nn.Softplus)
    state = torch.get_rng_state()
    penalty = gr.regularizers.DiverseHeads()
    batch = gr.Batch(torch.linspace(-1, 1, 42).reshape(7, 6))
    penalty(model, batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


class Counting(nn.Module):
    """An activation that counts the examples that it is given."""

    rows = 0

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.rows += len(x)
        return self.function(x)


@pytest.mark.parametrize("function", [torch.relu, torch.nn.functional.softplus])
def test_it_costs_less_than_two_forwards(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The first call is compared with the second one, in passes of the batch through the heads."""
    base = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    model = gr.SharedBase(base, [nn.Sequential(nn.Linear(4, 8), Counting(function), nn.Linear(8, 3)) for _ in range(2)])
    penalty, batch = gr.regularizers.DiverseHeads(of=gr.logit(0)), torch.randn(32, 6)
    gr.gradients(model, batch, gr.logit(0), gr.Features(), differentiable=True)  # checks of the engine, once per model
    spent = []
    for _ in range(2):
        Counting.rows = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            penalty(model, batch)
        spent.append(Counting.rows / (2 * len(batch)))  # two heads
    assert spent[1] == 1
    # of 100 steps, each a forward and a backward of twice its cost, 2% are six forwards
    assert spent[0] - spent[1] <= (2 if function is torch.relu else 0)


def test_functions_are_found_too() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x)))

    model = gr.SharedBase(nn.Linear(6, 4), [Plain() for _ in range(2)])
    with pytest.warns(ZeroSecondDerivativeWarning, match=r"Piecewise linear: heads\.0 \(relu\), heads\.1 \(relu\)"):
        published(model)


def test_softplus_above_its_threshold_is_measured_not_named() -> None:
    model = seed_model(lambda: nn.Softplus(beta=100))
    with torch.no_grad():
        for head in model.heads:
            head[0].bias.fill_(5.0)
    with pytest.warns(ZeroSecondDerivativeWarning, match=r"heads\.0\.1 \(Softplus\)"):
        published(model)
