"""Inner products of gradients of two sets of rows, whichever form each is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from gradreg.engine import Factors

__all__ = [
    "Dense",
    "Gradients",
    "accumulated",
    "by_layer",
    "dots",
    "dots_by_layer",
    "is_low",
    "row_dots",
    "row_dots_by_parameter",
    "squared_norms",
    "squares_by_parameter",
]

_LOW = (torch.float16, torch.bfloat16)


class Dense:
    """Whole gradients (or what stands for them: sums, optimizer steps, projections) of some rows."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.values = dict(values)

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(self.values)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(value.numel() * value.element_size() for value in self.values.values())

    def gradient(self, name: str) -> Tensor:
        """Return the part of one parameter, `[rows, *shape]`."""
        return self.values[name]

    def two_sided(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Return `left @ G @ right.T` of every row, as `Factors.two_sided` does."""
        return left @ self.values[name].flatten(2) @ right.T


Gradients: TypeAlias = "Factors | Dense"


def accumulated(factors: Factors, low: bool) -> Gradients:
    """Return gradients whose products do not overflow: those of half precision are taken to float32."""
    return Dense({name: factors.gradient(name).float() for name in factors.names}) if low else factors


def is_low(dtype: torch.dtype) -> bool:
    """Whether sums of squares in this precision would overflow or drown."""
    return dtype in _LOW


def dots(tests: Gradients, trains: Gradients) -> Tensor:
    """Return all inner products, `[tests, trains]`."""
    if isinstance(tests, Factors):
        return tests.dot(trains) if isinstance(trains, Factors) else tests.dot_directions(trains.values)
    if isinstance(trains, Factors):
        return trains.dot_directions(tests.values).T
    return torch.stack([_flat(tests, name) @ _flat(trains, name).T for name in tests.names]).sum(0)


def dots_by_layer(tests: Gradients, trains: Gradients) -> dict[str, Tensor]:
    """Return the inner products per layer; they sum to `dots`."""
    if isinstance(tests, Factors) and isinstance(trains, Factors):
        return by_layer(tests.dot_by_parameter(trains))
    return by_layer({name: _flat(tests, name) @ _flat(trains, name).T for name in tests.names})


def squared_norms(rows: Gradients) -> Tensor:
    """Return the squared norm of every row, `[rows]`."""
    return rows.squared_norms() if isinstance(rows, Factors) else row_dots(rows, rows)


def squares_by_parameter(rows: Gradients) -> dict[str, Tensor]:
    """Return the squared norms of every row per parameter, `[rows]` each."""
    if isinstance(rows, Factors):
        return rows.squared_norms_by_parameter()
    return {name: _flat(rows, name).square().sum(1) for name in rows.names}


def row_dots(first: Gradients, second: Gradients) -> Tensor:
    """Return the inner product of every row with its partner, `[rows]`."""
    return torch.stack(list(row_dots_by_parameter(first, second).values())).sum(0)


def row_dots_by_parameter(first: Gradients, second: Gradients) -> dict[str, Tensor]:
    """Return the inner product of every row with its partner per parameter, `[rows]` each."""
    return {name: (_flat(first, name) * _flat(second, name)).sum(1) for name in first.names}


def by_layer(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add up the parts of parameters that one module owns; a parameter of the model itself is a layer of its own."""
    layers: dict[str, Tensor] = {}
    for name, part in parts.items():
        layer = name.rpartition(".")[0] or name
        layers[layer] = layers[layer] + part if layer in layers else part
    return layers


def _flat(rows: Gradients, name: str) -> Tensor:
    return rows.gradient(name).flatten(1)
