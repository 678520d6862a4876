"""Several targets in one vmapped pullback: the same numbers as one by one, and the loop where vmap is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import inner_scale, targets_together
from gradreg.testing import assert_same
from tests.point_cases import ARCHITECTURES, heads

ALL = gr.all_logits()


def both(
    model: nn.Module, x: Tensor, wrt: Any, differentiable: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    alone = gr.gradients(model, x, ALL, wrt, differentiable=differentiable)
    with targets_together():
        return gr.gradients(model, x, ALL, wrt, differentiable=differentiable), alone


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
@pytest.mark.parametrize("differentiable", [False, True])
def test_the_same_gradients_and_second_derivatives(architecture: Any, differentiable: bool) -> None:
    model, x = architecture.model(), architecture.inputs()
    found, alone = both(model, x, gr.Inputs(), differentiable)
    assert_same(found, alone)
    if differentiable:
        seconds = [
            torch.autograd.grad(
                g["inputs"].square().sum(), list(model.parameters()), allow_unused=True, retain_graph=True
            )
            for g in (found, alone)
        ]
        for own, other in zip(*seconds, strict=True):
            torch.testing.assert_close(own, other)


@pytest.mark.parametrize(
    "wrt", [gr.Features(), gr.Inputs(), gr.Outputs(), (gr.Features(), gr.Activations("heads.*.0"))], ids=str
)
def test_heads(wrt: Any) -> None:
    assert_same(*both(heads(), torch.randn(3, 4, dtype=torch.float64), wrt))


def test_with_a_scale() -> None:
    model, x = ARCHITECTURES[0].model(), ARCHITECTURES[0].inputs()
    plain = gr.gradients(model, x, ALL, gr.Inputs())
    with targets_together(), inner_scale(64.0):
        assert_same(gr.gradients(model, x, ALL, gr.Inputs()), plain)


class OldCube(torch.autograd.Function):
    """A function in the old style, which vmap refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return OldSquare.apply(x, cotangent)


class OldSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cotangent: Tensor) -> Tensor:
        ctx.save_for_backward(x, cotangent)
        return 3 * x**2 * cotangent

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        x, first = ctx.saved_tensors
        return 6 * x * first * cotangent, 3 * x**2 * cotangent


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(OldCube.apply(self.first(x)))


@pytest.mark.parametrize("make", [Cubed])
def test_the_loop_where_vmap_is_refused(make: Callable[[], nn.Module]) -> None:
    model, x = make().double(), torch.randn(3, 4, dtype=torch.float64)
    found, alone = both(model, x, gr.Inputs())
    assert_same(found, alone)


@pytest.mark.parametrize("together", [True, False])
def test_large_results_are_pulled_one_by_one(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradreg.engine import _pull

    batched: list[bool] = []
    grad = torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        batched.append(kwargs.get("is_grads_batched", False))
        return grad(*args, **kwargs)

    size = 4 * 6 * 3 * 8  # targets, examples, entries, bytes
    monkeypatch.setattr(_pull, "_TOGETHER_BYTES", size if together else size - 1)
    net, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double(), torch.randn(6, 3).double()
    alone = gr.gradients(net, x, ALL, gr.Inputs())
    monkeypatch.setattr(torch.autograd, "grad", counted)
    with targets_together():
        assert_same(gr.gradients(net, x, ALL, gr.Inputs()), alone)
    assert batched == ([True] if together else [False] * 4)


def test_what_is_not_used_has_gradient_zero() -> None:
    net = nn.Bilinear(3, 3, 4).double()
    net.forward = lambda a, b: net.weight.sum((1, 2)) * a.sum(1, keepdim=True)
    batch = gr.Batch((torch.randn(2, 3).double(), torch.randn(2, 3).double()))
    alone = gr.gradients(net, batch, ALL, gr.Inputs())
    with targets_together():
        found = gr.gradients(net, batch, ALL, gr.Inputs())
    assert_same(found, alone)
    assert not found["1"].any()
