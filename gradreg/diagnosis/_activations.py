"""The activations whose second derivative is zero or missing: their smooth forms, and where their slope bends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.diagnosis._softplus import softplus

Smooth = Callable[..., Tensor]
Bends = Callable[..., Sequence[tuple[float, Any]]]


@dataclass(frozen=True)
class Activation:
    """One activation: a module, the functions that do the same, its smooth form, and its bends.

    Attributes:
        module: The module class.
        functions: Functions and tensor methods that compute it.
        settings: What its functions take after the input, in order, with defaults; modules have attributes of these names.
        smooth: `(x, beta, **settings)`, close to it for large beta and smooth.
        bends: `(**settings)` to points with the jump of the slope there; None where the second derivative is not zero everywhere.
        names: By what name a source calls one of the functions.
    """

    module: type[nn.Module]
    functions: tuple[Callable[..., Any], ...]
    settings: dict[str, Any]
    smooth: Smooth
    bends: Bends | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions."""
        return frozenset(function.__name__ for function in self.functions)

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, bool, dict[str, Any]]:
        """Return input, whether in place, and settings of a call of one of the functions."""
        order = ("input", *self.settings, "inplace")
        given = {"inplace": False, **self.settings, **dict(zip(order, args, strict=False)), **kwargs}
        x = given.pop("input", None)
        return given.pop("self", x) if x is None else x, bool(given.pop("inplace")), given


def _relu(x: Tensor, beta: float) -> Tensor:
    return softplus(x, beta)


def _leaky_relu(x: Tensor, beta: float, negative_slope: float) -> Tensor:
    return negative_slope * x + (1 - negative_slope) * softplus(x, beta)


def _prelu(x: Tensor, beta: float, weight: Tensor) -> Tensor:
    weight = per_channel(x, weight)
    return weight * x + (1 - weight) * softplus(x, beta)


def per_channel(x: Tensor, weight: Tensor) -> Tensor:
    """Return the slopes of a PReLU in the shape that meets the channels, axis 1."""
    return weight.reshape(()) if weight.numel() == 1 else weight.reshape(1, -1, *[1] * (x.dim() - 2))


def _rrelu(x: Tensor, beta: float, lower: float, upper: float, training: bool) -> Tensor:
    slope = torch.empty_like(x).uniform_(lower, upper) if training else (lower + upper) / 2
    return slope * x + (1 - slope) * softplus(x, beta)


def _clip(x: Tensor, beta: float, low: float, high: float) -> Tensor:
    return low + softplus(x - low, beta) - softplus(x - high, beta)


def _relu6(x: Tensor, beta: float) -> Tensor:
    return _clip(x, beta, 0, 6)


def _hardtanh(x: Tensor, beta: float, min_val: float, max_val: float) -> Tensor:
    return _clip(x, beta, min_val, max_val)


def _hardsigmoid(x: Tensor, beta: float) -> Tensor:
    return _clip(x + 3, beta, 0, 6) / 6


def _hardswish(x: Tensor, beta: float) -> Tensor:
    return x * _hardsigmoid(x, beta)


def _softshrink(x: Tensor, beta: float, lambd: float) -> Tensor:
    return x - _clip(x, beta, -lambd, lambd)


def _hardshrink(x: Tensor, beta: float, lambd: float) -> Tensor:
    steps = torch.sigmoid(beta * (x - lambd)) - torch.sigmoid(-beta * (x + lambd))
    return _softshrink(x, beta, lambd) + lambd * steps


def _threshold(x: Tensor, beta: float, threshold: float, value: float) -> Tensor:
    ramp = value + softplus(x - threshold, beta)
    return ramp if threshold == value else ramp + (threshold - value) * torch.sigmoid(beta * (x - threshold))


ACTIVATIONS: tuple[Activation, ...] = (
    Activation(
        nn.ReLU,
        (F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
        {},
        _relu,
        lambda: [(0.0, 1.0)],
    ),
    Activation(
        nn.LeakyReLU,
        (F.leaky_relu, F.leaky_relu_),
        {"negative_slope": 0.01},
        _leaky_relu,
        lambda negative_slope: [(0.0, 1 - negative_slope)],
    ),
    Activation(
        nn.PReLU,
        (F.prelu, torch.prelu, Tensor.prelu),
        {"weight": None},
        _prelu,
        lambda weight: [(0.0, 1 - weight)],
    ),
    Activation(
        nn.RReLU,
        (F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_),
        {"lower": 1 / 8, "upper": 1 / 3, "training": False},
        _rrelu,
        lambda lower, upper, training: [(0.0, 1 - (lower + upper) / 2)],
    ),
    Activation(nn.ReLU6, (F.relu6,), {}, _relu6, lambda: [(0.0, 1.0), (6.0, -1.0)]),
    Activation(
        nn.Hardtanh,
        (F.hardtanh, F.hardtanh_),
        {"min_val": -1.0, "max_val": 1.0},
        _hardtanh,
        lambda min_val, max_val: [(min_val, 1.0), (max_val, -1.0)],
    ),
    Activation(
        nn.Hardshrink,
        (F.hardshrink, torch.hardshrink, Tensor.hardshrink),
        {"lambd": 0.5},
        _hardshrink,
        lambda lambd: [(-lambd, -1.0), (lambd, 1.0)],
    ),
    Activation(
        nn.Softshrink, (F.softshrink,), {"lambd": 0.5}, _softshrink, lambda lambd: [(-lambd, -1.0), (lambd, 1.0)]
    ),
    Activation(
        nn.Threshold,
        (F.threshold, torch.threshold, torch.threshold_),
        {"threshold": 0.0, "value": 0.0},
        _threshold,
        lambda threshold, value: [(threshold, 1.0)],
    ),
    Activation(nn.Hardsigmoid, (F.hardsigmoid,), {}, _hardsigmoid, lambda: [(-3.0, 1 / 6), (3.0, -1 / 6)]),
    Activation(nn.Hardswish, (F.hardswish,), {}, _hardswish),
)

OF_MODULE: dict[type[nn.Module], Activation] = {row.module: row for row in ACTIVATIONS}
OF_FUNCTION: dict[Any, Activation] = {function: row for row in ACTIVATIONS for function in row.functions}
