"""Approximate search for huge indexes, by FAISS; what it proposes is scored exactly."""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradreg.errors import GradregError
from gradreg.tracin.index._scores import row_scores
from gradreg.tracin.index._shards import Shards

_FLAT_ROWS = 50_000  # below, all rows are compared: nothing is gained by lists
_TRAINING_ROWS = 100_000
_LEAST_CANDIDATES = 64


class FaissSearch:
    """Proposes rows with large inner products; made once per index and kept beside its shards.

    Up to 50,000 rows are compared one by one; of more, only those in the lists nearest to a test, so that some of the
    strongest may be missed. Scores of what is found are exact.

    Args:
        shards: Of the index.
        row_weights: Factors of the rows, `[checkpoints, rows]`.
        path: The file; it is written if it is not there.
        max_bytes: Of the rows held at a time.

    Raises:
        GradregError: If the package is not installed, or the stored vectors are float64.
    """

    def __init__(self, shards: Shards, row_weights: Tensor, path: Path, max_bytes: int) -> None:
        self._faiss = _package()
        if shards.layout.dtype != "float32":
            raise GradregError('search="faiss" knows float32 only; this index holds float64. search="exact" takes all.')
        self._shards, self._row_weights = shards, row_weights
        if not path.exists():
            found = self._build(max_bytes)
            temporary = path.with_name(f".{os.getpid()}.tmp.{path.name}")
            self._faiss.write_index(found, str(temporary))
            os.replace(temporary, path)
        self._index = self._faiss.read_index(str(path))

    def top_k(self, tests: list[Tensor], k: int, sign: int) -> tuple[Tensor, Tensor]:
        """Return scores and rows of the k strongest that were found, `[n_test, k]` both.

        Args:
            tests: Per checkpoint, vectors of the tests `[n_test, size]`, times learning rate and normalization.
            k: How many.
            sign: 1 for the highest scores, -1 for the lowest.
        """
        query = (sign * torch.cat(tests, 1)).contiguous()
        wanted = min(max(4 * k, _LEAST_CANDIDATES), self._shards.layout.rows)
        _, proposed = self._index.search(query.numpy(), wanted)
        scores, rows = [], []
        for test, candidates in enumerate(torch.from_numpy(proposed)):
            own = candidates[candidates >= 0].unique()  # in the order of the rows; -1 stands for none
            if len(own) < k:
                raise GradregError(f"FAISS found {len(own)} rows where k={k} were asked for; use search='exact'.")
            exact = row_scores(
                self._shards, [part[test : test + 1] for part in tests], self._row_weights, own.tolist()
            )[0]
            order = (sign * exact).sort(descending=True, stable=True).indices[:k]
            scores.append(exact[order])
            rows.append(own[order])
        return torch.stack(scores), torch.stack(rows)

    def _build(self, max_bytes: int) -> Any:
        layout = self._shards.layout
        width = layout.size * layout.checkpoints
        index = self._faiss.IndexFlatIP(width)
        if layout.rows > _FLAT_ROWS:
            lists = int(4 * math.sqrt(layout.rows))
            index = self._faiss.IndexIVFFlat(index, width, lists, self._faiss.METRIC_INNER_PRODUCT)
            index.nprobe = max(1, lists // 16)
            index.train(self._sample(_TRAINING_ROWS).numpy())
        for start, stop, vectors in self._shards.chunks(max_bytes):
            index.add(self._joined(vectors, slice(start, stop)).numpy())
        return index

    def _sample(self, most: int) -> Tensor:
        rows = self._shards.layout.rows
        chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:most].sort().values
        return self._joined(self._shards.gather(chosen.tolist()), chosen)

    def _joined(self, vectors: list[Tensor], rows: slice | Tensor) -> Tensor:
        weighted = [part * self._row_weights[c, rows].to(part.dtype)[:, None] for c, part in enumerate(vectors)]
        return torch.cat(weighted, 1).contiguous()


def _package() -> Any:
    try:
        return importlib.import_module("faiss")
    except ModuleNotFoundError:
        raise GradregError(
            "search=\"faiss\" needs the package faiss, which is not installed: pip install 'gradreg[faiss]'. "
            'search="exact" needs nothing.'
        ) from None
