"""Plain autograd, one example at a time: the formulas that penalties are compared with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from tests.point_cases import ARCHITECTURES, POINT_CASES, Architecture

EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)


def case_of(name: str, architecture: Architecture, outputs: int = 3) -> tuple[gr.Regularizer, nn.Module, gr.Batch]:
    """The regularizer of a row of the case table, with a model and a batch."""
    case = next(case for case in POINT_CASES if case.name == name)
    return case.make(), architecture.model(outputs), case.batch(architecture)


def slope(model: nn.Module, x: Tensor, scalar: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of a scalar of the outputs `[m]` with respect to one input, without its axis of examples."""
    one = x.detach().clone().unsqueeze(0).requires_grad_()
    (gradient,) = torch.autograd.grad(scalar(model(one)[0]), one)
    return gradient[0]


def same(found: Tensor, expected: Tensor | float) -> None:
    """Demand equality to 1e-10."""
    torch.testing.assert_close(found.detach(), torch.as_tensor(expected, dtype=found.dtype), rtol=1e-10, atol=1e-12)


class Quadratic(nn.Module):
    r"""$\frac12 x^\top A x$ with a trained, symmetric A: gradient Ax, Hessian A. Outputs `[n, 1]`."""

    def __init__(self, d: int = 4) -> None:
        super().__init__()
        root = torch.randn(d, d, dtype=torch.float64)
        self.root = nn.Parameter(root + root.T)

    @property
    def matrix(self) -> Tensor:
        return (self.root + self.root.T) / 2

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.matrix * x).sum(1, keepdim=True) / 2


def linear(outputs: int = 3, d: int = 4) -> nn.Linear:
    return nn.Linear(d, outputs).double()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def finite_gradients(penalty: Tensor, model: nn.Module) -> None:
    """Demand that a penalty and its derivatives are finite."""
    assert torch.isfinite(penalty)
    found = torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)
    assert all(torch.isfinite(gradient).all() for gradient in found if gradient is not None)


def zeroed(model: nn.Module) -> nn.Module:
    """The model with its last layer at zero: every input gradient vanishes."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        last.weight.zero_()
        if last.bias is not None:
            last.bias.zero_()
    return model
