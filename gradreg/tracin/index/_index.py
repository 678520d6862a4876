"""GradientIndex: training gradients on disk, computed once, asked often."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from gradreg.errors import GradregError
from gradreg.tracin._data import read_rows
from gradreg.tracin._diagnostics import dominance
from gradreg.tracin._memory import Budget
from gradreg.tracin._passes import Passes, opened
from gradreg.tracin._query import Query
from gradreg.tracin._ranking import Ranking, TopK, strongest, warn_if_dominated
from gradreg.tracin._reader import Reader
from gradreg.tracin._rows import Rows
from gradreg.tracin._scores import TOTAL, pair_scores
from gradreg.tracin._spec import Spec
from gradreg.tracin.index._chosen import ChosenRows
from gradreg.tracin.index._faiss import FaissSearch
from gradreg.tracin.index._from_tracin import as_vectors
from gradreg.tracin.index._manifest import Manifest
from gradreg.tracin.index._scores import BestRows, row_scores, stream_scores
from gradreg.tracin.index._shards import Shards
from gradreg.tracin.index._verify import Verification, compare

__all__ = ["GradientIndex"]


class GradientIndex:
    """Training gradients on disk, per checkpoint; made by `TracIn.index(train, path)`, which also opens one again.

    Scores are exact inner products of what is stored, streamed over the shards: memory stays bounded by the TracIn's
    `memory`, whatever the number of rows and queries. Without a projection the gradients themselves are stored and scores are
    those of `TracIn.influence`.

    Args:
        folder: Where it lies.
        spec: What it was made with; test gradients come from it.
        train: The training examples.
        manifest: As on disk.
        memory: Bytes to hold at a time.
        collate: From a list of rows to a batch.

    Example:
        >>> import tempfile, torch, torch.nn.functional as F
        >>> import gradreg as gr
        >>> net = torch.nn.Linear(3, 2)
        >>> train = (torch.randn(8, 3), torch.randint(0, 2, (8,)))
        >>> tracin = gr.TracIn(net, gr.loss(F.cross_entropy), gr.Checkpoint(net.state_dict(), learning_rate=0.1))
        >>> index = tracin.index(train, tempfile.mkdtemp())
        >>> index.influence((torch.randn(4, 3), torch.randint(0, 2, (4,)))).shape
        torch.Size([4, 8])
        >>> index
        GradientIndex(8 examples, 1 checkpoint, 8 numbers each)
    """

    def __init__(
        self,
        folder: str | Path,
        spec: Spec,
        train: Rows,
        manifest: Manifest,
        *,
        memory: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.path = Path(folder)
        self.manifest = manifest
        self._spec, self._train, self._memory, self._collate = spec, train, memory, collate
        self._shards = Shards(self.path, manifest)
        self._shards.refuse_damage()
        self._weights: Tensor | None = None
        self._faiss: FaissSearch | None = None

    def __len__(self) -> int:
        return self.manifest.layout.rows

    def __repr__(self) -> str:
        layout = self.manifest.layout
        plural = "" if layout.checkpoints == 1 else "s"
        return f"GradientIndex({layout.rows} examples, {layout.checkpoints} checkpoint{plural}, {layout.size} numbers each)"

    @property
    def nbytes(self) -> int:
        """Bytes of all shards on disk."""
        return sum(os.stat(self._shards.path(c, start)).st_size for c, start, _ in self.manifest.layout.shards())

    def influence(self, test: Any, *, out: str | Path | None = None) -> Tensor:
        """Return the scores of all pairs, `[tests, trains]`.

        Args:
            test: Test examples, as `TracIn.influence` takes them.
            out: A file to write the scores to, in NumPy's format, where they do not fit into memory; the result is then a
                tensor over that file.

        Returns:
            Scores in float64 for a model in float64, else in float32.

        Raises:
            GradregError: If the data do not fit, or a shard is damaged.
        """
        tests = read_rows(test, self._collate)
        shape, dtype = (len(tests), len(self)), np.dtype(self.manifest.layout.dtype)
        if out is None:
            scores = torch.empty(shape, dtype=torch.float64 if dtype == np.float64 else torch.float32)
        else:
            scores = torch.from_numpy(np.lib.format.open_memmap(out, mode="w+", dtype=dtype, shape=shape))
        for positions, vectors in self._test_vectors(tests):
            for start, stop, block in self._stream(vectors):
                scores[positions.start : positions.stop, start:stop] = block
        return scores

    @overload
    def top_k(self, test: Any, k: int = ..., sign: None = ..., *, search: str = ...) -> TopK: ...
    @overload
    def top_k(self, test: Any, k: int, sign: Literal[1, -1], *, search: str = ...) -> Ranking: ...
    def top_k(self, test: Any, k: int = 10, sign: int | None = None, *, search: str = "exact") -> TopK | Ranking:
        """Return the k strongest training examples of every test.

        Args:
            test: Test examples.
            k: How many.
            sign: None: a `TopK`. 1: the `Ranking` of the proponents alone; -1: that of the opponents.
            search: `"exact"` looks at all rows. `"faiss"`, for huge indexes, looks at those that FAISS proposes and scores them
                exactly; it may miss some, and the first call writes a file of the size of the index.

        Returns:
            Scores, columns and places `(dataset, row)`, as `TracIn.top_k` gives them.

        Raises:
            GradregError: If k or sign is out of range.
        """
        if sign not in (None, 1, -1):
            raise GradregError(f"sign={sign!r}; allowed are None (both), 1 (proponents) and -1 (opponents).")
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= len(self):
            raise GradregError(f"k={k!r}; allowed are integers from 1 to the {len(self)} training examples.")
        if search not in ("exact", "faiss"):
            raise GradregError(f"search={search!r}; allowed are 'exact' and 'faiss'.")
        strongest_rows = self._exact_rows if search == "exact" else self._proposed_rows
        found = [strongest_rows(vectors, k) for _, vectors in self._test_vectors(read_rows(test, self._collate))]
        top = self._ranked(found)
        return top if sign is None else top.proponents if sign == 1 else top.opponents

    def self_influence(self) -> Tensor:
        r"""Return the score of every training example with itself, $\\sum_c \\eta_c \\lVert g_i \\rVert^2$, `[trains]`.

        Raises:
            GradregError: If steps of an optimizer are stored, whose norms are no scores.
        """
        if self._spec.update == "optimizer":
            raise GradregError(
                "The index stores steps of the optimizer; TracIn.self_influence(train) gives the scores."
            )
        rates = torch.tensor([checkpoint.learning_rate for checkpoint in self._spec.checkpoints], dtype=torch.float64)
        return rates @ self._shards.squared_norms()

    def verify(self, k: int = 20, *, seed: int = 0) -> Verification:
        """Compare the scores of k random training examples against each other with exact ones, computed anew.

        Args:
            k: How many.
            seed: Of the draw.

        Returns:
            Relative error, rank correlation and agreement of the top.

        Raises:
            GradregError: If k is out of range.
        """
        if not isinstance(k, int) or isinstance(k, bool) or not 2 <= k <= len(self):
            raise GradregError(f"k={k!r}; allowed are integers from 2 to the {len(self)} training examples.")
        chosen = sorted(torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:k].tolist())
        subset = ChosenRows(self._train, chosen)
        weights = self._row_weights()
        found = torch.cat(
            [row_scores(self._shards, vectors, weights, chosen) for _, vectors in self._test_vectors(subset)]
        )
        exact_spec = replace(self._spec, projection=None, show_progress=False)
        with opened(exact_spec) as passes:
            trains, tests = (Reader(subset, side, passes.device) for side in ("train", "test"))
            budget = Budget(self._memory)
            exact = pair_scores(exact_spec, passes, trains, tests, range(k), Query(), budget).parts[TOTAL]
        return compare(found, exact)

    def _exact_rows(self, tests: list[Tensor], k: int) -> list[tuple[Tensor, Tensor]]:
        """Return scores and rows of proponents and of opponents."""
        both = BestRows(k, 1), BestRows(k, -1)
        for start, _, block in self._stream(tests):
            for best in both:
                best.add(start, block)
        return [best.result() for best in both]

    def _proposed_rows(self, tests: list[Tensor], k: int) -> list[tuple[Tensor, Tensor]]:
        if self._faiss is None:
            file = self.path / f"search-{self.manifest.key[:16]}.faiss"
            self._faiss = FaissSearch(self._shards, self._row_weights(), file, self._memory // 8)
        return [self._faiss.top_k(tests, k, sign) for sign in (1, -1)]

    def _ranked(self, found: list[list[tuple[Tensor, Tensor]]]) -> TopK:
        rankings = []
        for which in (0, 1):
            scores, columns = (torch.cat([pair[which][part] for pair in found]) for part in (0, 1))
            names = {column: self._train.identity(column) for column in columns.unique().tolist()}
            places = tuple(tuple(names[column] for column in line) for line in columns.tolist())
            rankings.append(Ranking(scores, columns, places))
        proponents, opponents = rankings
        top = TopK(proponents, opponents, dominance(strongest(proponents, opponents), len(self)))
        reader = Reader(self._train, "train", torch.device("cpu"))
        warn_if_dominated(top.dominance, reader.name, self._spec.normalize == "cosine")
        return top

    def _stream(self, tests: list[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
        return stream_scores(self._shards, tests, self._row_weights(), self._memory // 8)

    def _row_weights(self) -> Tensor:
        """Return what normalization multiplies the rows with, `[checkpoints, rows]`."""
        if self._weights is None:
            if self._spec.normalize == "cosine":
                self._weights = inverse(self._shards.squared_norms().sqrt())
            elif self._spec.normalize == "relatif":
                own = inverse(self.self_influence().sqrt())
                self._weights = own.expand(self.manifest.layout.checkpoints, -1)
            else:
                self._weights = torch.ones(1, 1, dtype=torch.float64).expand(
                    self.manifest.layout.checkpoints, len(self)
                )
        return self._weights

    def _test_vectors(self, tests: Rows) -> Iterator[tuple[range, list[Tensor]]]:
        """Yield groups of tests with their vectors per checkpoint, `[tests, size]`, times learning rate and normalization."""
        group = max(1, self._memory // (4 * self.manifest.layout.row_bytes))
        with self._opened(tests) as (passes, reader):
            for start in range(0, len(tests), group):
                positions = range(start, min(start + group, len(tests)))
                yield (
                    positions,
                    [self._vectors_at(c, passes, reader, positions) for c in range(len(self._spec.checkpoints))],
                )

    def _vectors_at(self, checkpoint: int, passes: Passes, reader: Reader, positions: range) -> Tensor:
        spec = self._spec
        rate = passes.load(checkpoint)[0].learning_rate
        passes.check(reader, spec.test_of)
        parts = []
        step = self.manifest.layout.batch_rows
        for begin in range(positions.start, positions.stop, step):
            batch = range(begin, min(begin + step, positions.stop))
            vectors = as_vectors(passes.rows(reader.batch(batch), spec.test_of)).cpu()
            norms = vectors.double().norm(dim=1)
            if not bool(torch.isfinite(norms).all()):
                reader.refuse_broken([batch[place] for place in (~torch.isfinite(norms)).nonzero()[:, 0].tolist()])
            if spec.normalize == "cosine":
                vectors = vectors * inverse(norms).to(vectors.dtype)[:, None]
            parts.append(rate * vectors)
        return torch.cat(parts)

    @contextmanager
    def _opened(self, tests: Rows) -> Iterator[tuple[Passes, Reader]]:
        with opened(self._spec) as passes:
            yield passes, Reader(tests, "test", passes.device)


def inverse(norms: Tensor) -> Tensor:
    """Return 1 / norm, and 0 for a gradient of zero, which is similar to nothing."""
    return torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))
