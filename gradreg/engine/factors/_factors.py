"""The result of one pass: gradients of many rows with respect to many parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Coverage:
    """How a parameter takes part: its share of all parameters, the rule, and why it was left out (rule None)."""

    name: str
    numel: int
    rule: str | None
    reason: str = ""


class Factors:
    """Gradients of `len(factors)` scalars (rows) with respect to named parameters."""

    def __init__(self, gradients: Mapping[str, Tensor], coverage: tuple[Coverage, ...]) -> None:
        self._gradients = dict(gradients)
        self.coverage = coverage

    def __len__(self) -> int:
        return len(next(iter(self._gradients.values())))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(self._gradients)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(value.numel() * value.element_size() for value in self._gradients.values())

    def gradient(self, name: str) -> Tensor:
        """Return the gradients with respect to one parameter, `[rows, *shape]`."""
        return self._gradients[name]

    def two_sided(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Return `left @ G @ right.T` of every row, G the gradient as a matrix `[shape[0], rest]`: `[rows, k_l, k_r]`."""
        return left @ self.gradient(name).flatten(2) @ right.T

    def dot(self, other: Factors) -> Tensor:
        """Return all inner products, `[rows, other's rows]`."""
        return torch.stack(list(self.dot_by_parameter(other).values())).sum(0)

    def dot_by_parameter(self, other: Factors) -> dict[str, Tensor]:
        """Return the inner products per parameter; they sum to `dot`."""
        return {name: self._gradients[name].flatten(1) @ other._gradients[name].flatten(1).T for name in self.names}

    def dot_directions(self, directions: Mapping[str, Tensor]) -> Tensor:
        """Return inner products with dense directions `{name: [m, *shape]}`: `[rows, m]`."""
        parts = [self._gradients[name].flatten(1) @ directions[name].flatten(1).T for name in self.names]
        return torch.stack(parts).sum(0)

    def squared_norms(self) -> Tensor:
        """Return the squared norm of every row's gradient, `[rows]`."""
        return torch.stack(list(self.squared_norms_by_parameter().values())).sum(0)

    def squared_norms_by_parameter(self) -> dict[str, Tensor]:
        """Return the squared norms per parameter; they sum to `squared_norms`."""
        return {name: value.flatten(1).square().sum(1) for name, value in self._gradients.items()}

    def select(self, rows: slice | Tensor) -> Factors:
        """Return some of the rows."""
        return Factors({name: value[rows] for name, value in self._gradients.items()}, self.coverage)
