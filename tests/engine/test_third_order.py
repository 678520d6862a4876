"""Third derivatives through normalizations whose kernels get them wrong (torch 2.13), against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.testing import assert_same, reference


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (5,))


NORMS: list[Callable[[], nn.Module]] = [
    lambda: nn.LayerNorm(5),
    lambda: nn.GroupNorm(1, 5),
    lambda: nn.RMSNorm(5),
    Functional,
]


def network(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), norm, nn.Tanh(), nn.Linear(5, 2)).double()


def curvature(model: nn.Module, x: Tensor) -> Tensor:
    """A penalty on v'Hv, whose gradient is a third derivative."""
    x = x.clone().requires_grad_()
    first = gr.gradients(model, x, gr.logit(0), gr.Inputs(), differentiable=True)["inputs"]
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().sum()


class Curvature(gr.Regularizer):
    order = 3

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        return curvature(model, batch.inputs)


@pytest.mark.parametrize("make", NORMS, ids=["LayerNorm", "GroupNorm", "RMSNorm", "functional"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in an objective"])
def test_gradient_of_a_curvature_penalty(make: Callable[[], nn.Module], inside: bool) -> None:
    model, x = network(make()), torch.randn(4, 3, dtype=torch.float64)
    direction = [torch.randn_like(p) for p in model.parameters()]

    def value() -> Tensor:
        if inside:
            return gr.Objective(None, curvature=Curvature())(model, gr.Batch(x))[0]
        return curvature(model, x)

    found = torch.autograd.grad(value(), list(model.parameters()), allow_unused=True)
    slope = sum((g * d).sum() for g, d in zip(found, direction, strict=True) if g is not None)
    step, sides = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(d, alpha=sign * step)
        sides.append(value().detach())
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.sub_(d, alpha=sign * step)
    torch.testing.assert_close(slope, (sides[0] - sides[1]) / (2 * step), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen base", "trained base"])
def test_normalizing_heads_behind_a_base(frozen: bool) -> None:
    """Behind a frozen base the gradients come with the heads' pass by vmap(grad), where kernels of norms are wrong."""
    heads = [nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(5)]
    model = gr.SharedBase(nn.Linear(3, 4).requires_grad_(not frozen), heads).double()
    batch = gr.Batch(torch.randn(4, 3, dtype=torch.float64))
    truth = reference.second_derivative(model, batch, gr.logit(0), gr.Features())
    assert_same(reference.second_derivative(model, batch, gr.logit(0), gr.Features(), gradients=gr.gradients), truth)


def test_instance_norm_with_running_statistics() -> None:
    """In train mode the kernel is as wrong as without them; written out, they move as the kernel moves them."""
    norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    model = nn.Sequential(
        nn.Linear(3, 6), nn.Unflatten(1, (2, 3)), norm, nn.Flatten(), nn.Tanh(), nn.Linear(6, 2)
    ).double()
    x, weight = torch.randn(4, 3, dtype=torch.float64), model[0].weight
    direction, step, sides = torch.randn_like(weight), 1e-5, []
    (gradient,) = torch.autograd.grad(curvature(model, x), weight)
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(direction, alpha=sign * step)
        sides.append(curvature(model, x).detach())
        with torch.no_grad():
            weight.sub_(direction, alpha=sign * step)
    torch.testing.assert_close((gradient * direction).sum(), (sides[0] - sides[1]) / (2 * step), rtol=1e-5, atol=1e-6)

    kernel = nn.InstanceNorm1d(2, affine=True, track_running_stats=True).double()
    kernel(model[:2](x))
    gr.Objective(None, curvature=Curvature())(model, gr.Batch(x))  # without shares: its own forwards leave the buffers
    assert torch.equal(norm.running_mean, torch.zeros(2, dtype=torch.float64))

    class Shared(gr.Regularizer):
        def shares(self) -> list[object]:
            return [(gr.logit(0), gr.Inputs())]

        def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
            return gr.gradients(model, batch, gr.logit(0), gr.Inputs(), differentiable=True)["inputs"].square().sum()

    gr.Objective(None, slope=Shared())(model, gr.Batch(x))
    torch.testing.assert_close(norm.running_mean, kernel.running_mean)
    torch.testing.assert_close(norm.running_var, kernel.running_var)
