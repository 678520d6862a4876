"""Scores of tests against all rows of an index, streamed in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradreg.tracin.index._shards import Shards


def stream_scores(
    shards: Shards, tests: list[Tensor], row_weights: Tensor, max_bytes: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield `(start, stop, scores [n_test, stop - start])` over all rows.

    Args:
        shards: Of the index.
        tests: Per checkpoint, vectors of the tests `[n_test, size]`, already times the learning rate.
        row_weights: Factors of the rows, `[checkpoints, rows]`.
        max_bytes: Of the rows held at a time.
    """
    for start, stop, vectors in shards.chunks(max_bytes):
        scores = torch.zeros(len(tests[0]), stop - start, dtype=tests[0].dtype)
        for checkpoint, (test, rows) in enumerate(zip(tests, vectors, strict=True)):
            scores += (test @ rows.T) * row_weights[checkpoint, start:stop].to(scores.dtype)
        yield start, stop, scores


def row_scores(shards: Shards, tests: list[Tensor], row_weights: Tensor, rows: list[int]) -> Tensor:
    """Return the scores of tests against some rows, `[n_test, len(rows)]`; arguments as for `stream_scores`."""
    total = torch.zeros(len(tests[0]), len(rows), dtype=tests[0].dtype)
    for checkpoint, (test, own) in enumerate(zip(tests, shards.gather(rows), strict=True)):
        total += (test @ own.T) * row_weights[checkpoint, rows].to(own.dtype)
    return total


class BestRows:
    """The `k` best rows per test among those seen so far: by score, then the lower row."""

    def __init__(self, k: int, sign: int = 1) -> None:
        self._k = k
        self._sign = sign
        self._scores: Tensor | None = None
        self._rows: Tensor | None = None

    def add(self, start: int, scores: Tensor) -> None:
        """Take scores `[n_test, m]` of the rows `start ... start + m - 1`, which follow all earlier ones."""
        rows = torch.arange(start, start + scores.shape[1]).expand_as(scores)
        if self._scores is not None and self._rows is not None:
            scores, rows = torch.cat([self._scores, scores], 1), torch.cat([self._rows, rows], 1)
        # Candidates lie in the order of their rows only among equals, which is all that a stable sort needs.
        order = _best(self._sign * scores, self._k)
        self._scores, self._rows = scores.gather(1, order), rows.gather(1, order)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return scores and rows, `[n_test, k]` both."""
        assert self._scores is not None, "no row was added"
        assert self._rows is not None
        return self._scores, self._rows


def _best(values: Tensor, k: int) -> Tensor:
    """Return the places of the `k` largest values per line, in falling order; of equals, the first come first."""
    k = min(k, values.shape[1])
    last = values.topk(k, dim=1).values[:, -1:]
    counts = (values >= last).sum(1)
    most = int(counts.max())
    # topk chooses freely among equals, so all that reach the last value are sorted; usually these are k
    if most > max(4 * k, 64):
        return values.sort(dim=1, descending=True, stable=True).indices[:, :k]
    chosen = torch.where(values >= last, values, values.new_tensor(-torch.inf)).topk(most, dim=1).indices.sort(1).values
    order = values.gather(1, chosen).masked_fill(values.gather(1, chosen) < last, -torch.inf)
    return chosen.gather(1, order.sort(dim=1, descending=True, stable=True).indices[:, :k])
