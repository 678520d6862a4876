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
