"""Rows: examples in a fixed order, known by where they lie and by what they hold."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from gradreg.batch import Batch, as_batch
from gradreg.errors import BatchError
from gradreg.model import preserved_random_state
from gradreg.tracin._collate import collate_samples
from gradreg.tracin._hash import content_hash

__all__ = ["Collate", "RowId", "Rows", "SampleRows", "TensorRows", "quiet"]

Collate = Callable[[list[Any]], Any]


class RowId(NamedTuple):
    """Where an example lies: in which of the merged datasets (a position or name; 0 for one alone), and at which row."""

    dataset: int | str
    row: int


class TensorRows:
    """Examples that lie in memory as tensors."""

    stable = True

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.rows: Sequence[int] = range(len(batch))

    def samples(self, rows: Sequence[int]) -> list[Any]:
        return [self.batch[row : row + 1] for row in rows]

    def collate(self, rows: Sequence[int]) -> Batch:
        first, count = rows[0], len(rows)
        if list(rows) == list(range(first, first + count)):
            return self.batch[first : first + count]
        return self.batch[torch.as_tensor(rows, device=self.batch.tensors()[0].device)]


class SampleRows:
    """Examples of a map-style dataset."""

    stable = False

    def __init__(self, dataset: Any, rows: Sequence[int] | None) -> None:
        self.dataset = dataset
        self.rows = range(len(dataset)) if rows is None else rows

    def samples(self, rows: Sequence[int]) -> list[Any]:
        several = getattr(self.dataset, "__getitems__", None)  # datasets of HF read many rows at once
        return list(several(list(rows))) if several is not None else [self.dataset[row] for row in rows]


class Rows:
    """Examples in a fixed order, the columns (or rows) of a score matrix.

    `len(rows)`, `rows.identity(position)`, `rows.batch(positions)`, `rows.hashes(positions)`. Reading leaves the random
    streams of torch, numpy and Python as they were.
    """

    def __init__(self, parts: Mapping[int | str, TensorRows | SampleRows], collate: Collate | None) -> None:
        self._parts = list(parts.items())
        self._collate = collate
        self._ends = np.cumsum([len(part.rows) for _, part in self._parts])
        if not len(self):
            raise BatchError("The dataset is empty: it has no example.")
        if len({type(part) for _, part in self._parts}) > 1:
            raise BatchError("Merged datasets must be all tensors (or batches), or all datasets; found a mixture.")

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def stable(self) -> bool:
        """Whether the examples are tensors in memory, which no second reading changes."""
        return all(part.stable for _, part in self._parts)

    def _place(self, position: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._ends, position, side="right"))
        within = position - (int(self._ends[part - 1]) if part else 0)
        return part, int(self._parts[part][1].rows[within])

    def identity(self, position: int) -> RowId:
        """Return where an example lies: `data[row]`, or `data.datasets[dataset][row]` of merged datasets."""
        part, row = self._place(position)
        return RowId(self._parts[part][0], row)

    def _samples(self, positions: Sequence[int]) -> list[Any]:
        places: dict[int, list[int]] = {}
        order: list[tuple[int, int]] = []
        for position in positions:
            part, row = self._place(position)
            order.append((part, len(places.setdefault(part, []))))
            places[part].append(row)
        with quiet():
            found = {part: self._parts[part][1].samples(rows) for part, rows in places.items()}
        return [found[part][place] for part, place in order]

    def batch(self, positions: Sequence[int]) -> Batch:
        """Return the examples at some positions, in that order."""
        if len(self._parts) == 1 and isinstance(self._parts[0][1], TensorRows):
            return self._parts[0][1].collate(positions)
        return self._collated(self._samples(positions))

    def read(self, positions: Sequence[int]) -> tuple[Batch, np.ndarray]:
        """Return the examples at some positions, and their content hashes `[n]` (unsigned 64-bit)."""
        samples = self._samples(positions)
        hashes = np.array([content_hash(sample) for sample in samples], dtype=np.uint64)
        if self.stable:
            return self.batch(positions), hashes
        return self._collated(samples), hashes

    def hashes(self, positions: Sequence[int]) -> np.ndarray:
        """Return the content hashes of the examples at some positions, `[n]` (unsigned 64-bit)."""
        return np.array([content_hash(sample) for sample in self._samples(positions)], dtype=np.uint64)

    def fingerprint(self, chunk: int = 256) -> str:
        """Return one hash of all examples in their order; it changes when any of them does."""
        digest = hashlib.blake2b(digest_size=16)
        for positions in self.chunks(chunk):
            digest.update(self.hashes(positions).astype("<u8").tobytes())
        return digest.hexdigest()

    def chunks(self, size: int) -> Iterator[range]:
        """Yield consecutive ranges of at most `size` positions."""
        for start in range(0, len(self), size):
            yield range(start, min(start + size, len(self)))

    def _collated(self, samples: list[Any]) -> Batch:
        if isinstance(samples[0], Batch) and self._collate is None:
            batch = _joined(samples)
        else:
            with quiet():
                batch = as_batch((self._collate or collate_samples)(samples))
        if len(batch) != len(samples):
            raise BatchError(
                f"Collating made {len(batch)} examples of {len(samples)} rows; every row must stay one example, in its order, "
                "or scores would be given to the wrong rows."
            )
        return batch


def _joined(batches: list[Any]) -> Batch:
    """Concatenate batches of one example, of merged tensors or of a dataset whose rows are batches."""
    leaves = [batch.tensors() for batch in batches]
    if any([t.shape[1:] for t in own] != [t.shape[1:] for t in leaves[0]] for own in leaves):
        raise BatchError("Merged tensors differ in shape between datasets; pad them alike.")
    columns = iter([torch.cat(column) for column in zip(*leaves, strict=True)])
    found = {id(tensor): column for tensor, column in zip(leaves[0], columns, strict=True)}
    joined: Batch = batches[0].map(lambda tensor: found[id(tensor)])
    return joined


@contextmanager
def quiet() -> Iterator[None]:
    """Restore the random streams of torch, numpy and Python: datasets may draw from any of them."""
    state, numbers = random.getstate(), np.random.get_state()
    try:
        with preserved_random_state(set()):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)
