"""The result of one pass: gradients of many rows with respect to many parameters, as sums of outer products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from gradreg.engine.factors._pieces import Dense, Grams, Piece, add_products, add_row_products
from gradreg.errors import GradregError, UnknownNameError, closest


@dataclass(frozen=True)
class Coverage:
    """How one parameter takes part.

    Attributes:
        name: Of the parameter.
        numel: Its numbers.
        rule: The rule that gives its gradients; None where it is left out.
        reason: Why no closed form serves it, or why it is left out.
    """

    name: str
    numel: int
    rule: str | None
    reason: str = ""


class Factors:
    """Gradients of `len(factors)` scalars (rows) with respect to named parameters.

    Args:
        pieces: From the name of a parameter to the parts that its gradients are the sum of.
        rows: Number of rows.
        coverage: How every parameter of the model takes part.
        targets: The axes of targets, where rows are (example, target).
    """

    def __init__(
        self,
        pieces: Mapping[str, list[Piece]],
        rows: int,
        coverage: tuple[Coverage, ...],
        targets: tuple[int, ...] = (),
    ) -> None:
        self._pieces = dict(pieces)
        self._rows = rows
        self.coverage = coverage
        self.targets = targets

    @classmethod
    def written_out(cls, gradients: Mapping[str, Tensor]) -> Factors:
        """Hold whole gradients, or what stands for them (sums, steps of an optimizer, projections): `{name: [rows, *shape]}`."""
        pieces: dict[str, list[Piece]] = {name: [Dense(value)] for name, value in gradients.items()}
        return cls(pieces, len(next(iter(gradients.values()))), ())

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"Factors({self._rows} rows, {len(self._pieces)} parameters, {self.nbytes / 2**20:.1f} MiB)"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(self._pieces)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(piece.nbytes for pieces in self._pieces.values() for piece in pieces)

    def gradient(self, name: str) -> Tensor:
        """Write out the gradients with respect to one parameter, `[rows, *shape]`."""
        if name not in self._pieces:
            raise UnknownNameError(f"There are no gradients for {name!r}; there are {closest(name, self._pieces)}.")
        first, *others = self._pieces[name]
        value = first.dense()
        for piece in others:
            value = value + piece.dense()
        return value

    def two_sided(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Return `left @ G @ right.T` of every row, G the gradient as a matrix `[shape[0], rest]`: `[rows, k_l, k_r]`."""
        return torch.stack([piece.two_sided(left, right) for piece in self._pieces[name]]).sum(0)

    def dot(self, other: Factors) -> Tensor:
        """Return all inner products, `[rows, other's rows]`."""
        total = self._zeros(len(other))
        grams: Grams = {}
        for name in self._shared(other):
            grams = self._add(total, other, name, grams)
        return total

    def dot_by_parameter(self, other: Factors) -> dict[str, Tensor]:
        """Return the inner products per parameter; they sum to `dot`."""
        parts, grams = {}, Grams()
        for name in self._shared(other):
            parts[name] = self._zeros(len(other))
            grams = self._add(parts[name], other, name, grams)
        return parts

    def squared_norms(self) -> Tensor:
        """Return the squared norm of every row's gradient, `[rows]`."""
        return torch.stack(list(self.squared_norms_by_parameter().values())).sum(0)

    def squared_norms_by_parameter(self) -> dict[str, Tensor]:
        """Return the squared norms per parameter; they sum to `squared_norms`."""
        norms = {}
        for name, pieces in self._pieces.items():
            norms[name] = self._zeros()
            for piece in pieces:
                add_row_products(norms[name], piece, piece)
            for one, other in combinations(pieces, 2):
                twice = self._zeros()
                add_row_products(twice, one, other)
                norms[name] += 2 * twice
        return norms

    def row_dots_by_parameter(self, other: Factors) -> dict[str, Tensor]:
        """Return the inner product of every row with the same row of the other, per parameter, `[rows]` each."""
        parts = {}
        for name in self._shared(other):
            parts[name] = self._zeros()
            for one in self._pieces[name]:
                for counterpart in other._pieces[name]:
                    add_row_products(parts[name], one, counterpart)
        return parts

    def select(self, rows: slice | Tensor) -> Factors:
        """Return some of the rows."""
        pieces = {name: [piece.select(rows) for piece in pieces] for name, pieces in self._pieces.items()}
        return Factors(pieces, len(torch.arange(self._rows)[rows]), self.coverage)

    def _shared(self, other: Factors) -> tuple[str, ...]:
        if set(self._pieces) != set(other._pieces):
            odd = sorted(set(self._pieces) ^ set(other._pieces))
            raise GradregError(
                f"The two sides have gradients of different parameters: only one has {', '.join(map(repr, odd[:3]))}."
            )
        return self.names

    def _add(self, total: Tensor, other: Factors, name: str, grams: Grams) -> Grams:
        for one in self._pieces[name]:
            for counterpart in other._pieces[name]:
                add_products(total, one, counterpart, grams)
        # a weight shares its Gram matrix with the bias of its module, which follows; older ones are not needed again
        return dict(list(grams.items())[-2:])

    def _zeros(self, *columns: int) -> Tensor:
        first = next(piece for pieces in self._pieces.values() for piece in pieces)
        tensor = first.value if isinstance(first, Dense) else first.right
        return tensor.new_zeros(self._rows, *columns)
