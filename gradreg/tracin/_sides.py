"""The gradients of one side: test examples that are kept as memory allows, training examples that stream past."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradreg.batch import Batch
from gradreg.engine import Factors
from gradreg.scalars import ScalarFunction
from gradreg.tracin._memory import Budget
from gradreg.tracin._passes import Passes
from gradreg.tracin._reader import Reader
from gradreg.tracin._tokens import per_token

__all__ = ["Side", "View", "aggregated", "batches", "kept", "streamed"]


@dataclass(frozen=True)
class View:
    """How the rows of one side are looked at.

    Attributes:
        of: Their scalar.
        split: Whether rows are tokens rather than examples.
        step: Whether the directions of optimizer steps stand in for gradients, if the TracIn asks for them.
        norms: Whether norms of whole examples are wanted.
    """

    of: ScalarFunction
    split: bool = False
    step: bool = False
    norms: bool = False


@dataclass(frozen=True)
class Side:
    """Gradients of some rows.

    Attributes:
        where: Their places in the result.
        positions: Their positions in the data.
        rows: Gradients, of every example or of every (example, token).
        norms: Norms of whole examples, `[examples]`, where they are wanted.
    """

    where: slice
    positions: Sequence[int]
    rows: Factors
    norms: Tensor | None

    @property
    def tokens(self) -> int:
        """Rows per example."""
        return len(self.rows) // int(self.where.stop - self.where.start)


def batches(reader: Reader, positions: Sequence[int], kind: object, budget: Budget) -> Iterator[tuple[slice, Batch]]:
    """Yield batches as large as the budget allows at that moment, with their places in the result."""
    start = 0
    while start < len(positions):
        stop = min(start + budget.chunk(kind), len(positions))
        yield slice(start, stop), reader.batch(positions[start:stop])
        start = stop


def streamed(passes: Passes, reader: Reader, positions: Sequence[int], view: View, budget: Budget) -> Iterator[Side]:
    """Yield the gradients of one batch after the other."""
    kind = (reader.side, view.split)
    for where, batch in batches(reader, positions, kind, budget):
        of = per_token(view.of) if view.split else view.of
        rows = passes.rows(batch, of, each_target=view.split, step=view.step)
        budget.observe(kind, rows.nbytes, len(batch))
        norms = None
        if view.norms:
            whole = passes.rows(batch, view.of, step=view.step) if view.split else rows
            norms = whole.squared_norms().sqrt()
        yield Side(where, positions[where], rows, norms)


def kept(passes: Passes, reader: Reader, positions: Sequence[int], view: View, budget: Budget) -> Iterator[list[Side]]:
    """Yield groups that fit into memory together; all of them at once, if they do."""
    group: list[Side] = []
    held = 0
    for side in streamed(passes, reader, positions, view, budget):
        if group and held + side.rows.nbytes > budget.kept:
            yield group
            group, held = [], 0
        group.append(side)
        held += side.rows.nbytes
    yield group


def aggregated(passes: Passes, reader: Reader, positions: Sequence[int], view: View, budget: Budget) -> Side:
    """Return the sum of all gradients as one row; memory does not depend on how many there are."""
    total: dict[str, Tensor] = {}
    for _, batch in batches(reader, positions, (reader.side, "sum"), budget):
        part = passes.total(batch, view.of)
        budget.observe((reader.side, "sum"), part.nbytes, len(batch))
        for name in part.names:
            value = part.gradient(name)
            total[name] = total[name] + value if name in total else value
    rows = Factors.written_out(total)
    norms = rows.squared_norms().sqrt() if view.norms else None
    return Side(slice(0, 1), positions, rows, norms)


def broken_rows(side: Side) -> list[int]:
    """Return the positions of the examples whose gradients are NaN or infinite."""
    finite = torch.isfinite(side.rows.squared_norms()).view(-1, side.tokens).all(1)
    return [position for position, fine in zip(side.positions, finite.tolist(), strict=False) if not fine]
