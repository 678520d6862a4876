"""Small models and penalties for the tests of the doctor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradreg as gr


def two_heads(activation: Callable[[], nn.Module], base: nn.Module | None = None) -> gr.SharedBase:
    """The example of the seed: two heads over a trainable base."""
    base = base if base is not None else nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return gr.SharedBase(base, [nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 3)) for _ in range(2)])


def examples(n: int = 7, width: int = 6) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(5))


def status(report: gr.DoubleBackwardReport, prefix: str) -> set[str]:
    """The statuses of all parameters whose names begin so."""
    found = {value.status for name, value in report.parameters.items() if name.startswith(prefix)}
    assert found, prefix
    return found


def named(report: gr.DoubleBackwardReport) -> set[str]:
    return {cause.name for cause in report.causes}


def kinds(report: gr.DoubleBackwardReport) -> set[str]:
    return {cause.kind for cause in report.causes}


def advice(report: gr.DoubleBackwardReport) -> str:
    return " ".join(cause.remedy for cause in report.causes)


INPUT_GRADIENT = (gr.logit(0), gr.Inputs())
FEATURE_GRADIENT = (gr.logit(0), gr.Features())


def by_hand(model: nn.Module, x: Any) -> Tensor:
    """A penalty on input gradients in plain torch."""
    x = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
    return gradient.square().sum()


def tokens(n: int = 3) -> Tensor:
    """Three tokens of width four."""
    return torch.randn(n, 3, 4, generator=torch.Generator().manual_seed(1))
