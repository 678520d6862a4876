"""The strongest examples of every test, with where they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradreg.errors import AttributionWarning, warn
from gradreg.tracin._diagnostics import Dominance
from gradreg.tracin._rows import RowId

__all__ = ["Ranking", "TopK", "joined", "rank", "strongest", "warn_if_dominated"]


@dataclass(frozen=True, eq=False)
class Ranking:
    """The k strongest training examples of every test, the strongest first; equal scores in the order of the data.

    Attributes:
        scores: `[tests, k]`.
        columns: Their columns in a score matrix, `[tests, k]`.
        rows: Where they lie: `rows[test][rank]` is `(dataset, row)`.
    """

    scores: Tensor
    columns: Tensor
    rows: tuple[tuple[RowId, ...], ...]

    def __str__(self) -> str:
        lines = []
        for test, (scores, rows) in enumerate(zip(self.scores.tolist(), self.rows, strict=True)):
            shown = ", ".join(f"{_where(row)}: {score:.4g}" for score, row in zip(scores, rows, strict=True))
            lines.append(f"test {test}: {shown}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class TopK:
    """Proponents (highest scores: training on them lowers the test loss) and opponents (lowest) of every test.

    Attributes:
        proponents: The highest scores, falling.
        opponents: The lowest scores, rising.
        dominance: Whether a few examples are the strongest of nearly all tests.
    """

    proponents: Ranking
    opponents: Ranking
    dominance: Dominance

    def __str__(self) -> str:
        return f"Proponents\n{self.proponents}\nOpponents\n{self.opponents}"


def rank(scores: Tensor, k: int, sign: int, identity: Callable[[int], RowId]) -> Ranking:
    """Rank every row of a score matrix.

    Args:
        scores: `[tests, trains]`.
        k: How many.
        sign: 1 for the highest scores, -1 for the lowest.
        identity: From a column to where the example lies.
    """
    order = torch.sort(scores * -sign, dim=1, stable=True).indices[:, :k]
    names = {column: identity(column) for column in order.unique().tolist()}
    rows = tuple(tuple(names[column] for column in line) for line in order.tolist())
    return Ranking(scores.gather(1, order), order, rows)


def joined(rankings: list[Ranking]) -> Ranking:
    """Return the rankings of several sets of tests as one."""
    if len(rankings) == 1:
        return rankings[0]
    rows = tuple(line for ranking in rankings for line in ranking.rows)
    return Ranking(torch.cat([r.scores for r in rankings]), torch.cat([r.columns for r in rankings]), rows)


def warn_if_dominated(found: Dominance, name: Callable[[int], str], normalized: bool) -> None:
    """Say so when one example is the strongest of nearly all tests."""
    if found.dominated:
        remedy = "" if normalized else ' normalize="cosine" compares directions alone.'
        warn(
            f"{name(found.column).capitalize()} has the largest score, in absolute value, for {found.count} of {found.tests} "
            f"tests, probably because its gradient is large (see self_influence).{remedy}",
            AttributionWarning,
        )


def _where(row: RowId) -> str:
    return str(row.row) if row.dataset == 0 else f"{row.dataset}[{row.row}]"


def strongest(proponents: Ranking, opponents: Ranking) -> Tensor:
    """Return the column of the largest absolute score of every test, `[tests]`."""
    first, last = proponents.scores[:, 0].abs(), opponents.scores[:, 0].abs()
    return torch.where(first >= last, proponents.columns[:, 0], opponents.columns[:, 0])
