"""A memory budget in place of a batch size."""

from __future__ import annotations

import re

from gradreg.errors import GradregError

__all__ = ["Budget", "as_bytes"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_FIRST_ROWS = 16  # what the first, unmeasured chunk holds
_LARGEST_CHUNK = 512  # more rows at a time are no faster on any machine that was measured
# A pass holds about this many times the bytes of its factors: they are most of its activations and gradients.
_OVERHEAD = 2


def as_bytes(memory: int | str) -> int:
    """Read a number of bytes: `2**30`, `"1 GiB"`, `"500MB"`.

    Raises:
        GradregError: If it is no positive amount.
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([kmg]i?)?b?\s*", memory.lower()) if isinstance(memory, str) else None
    if found is not None:
        amount = int(float(found[1]) * _UNITS[found[2] or ""])
    elif isinstance(memory, int) and not isinstance(memory, bool):
        amount = memory
    else:
        amount = 0
    if amount < 1:
        raise GradregError(f"memory={memory!r}; allowed are numbers of bytes and texts such as '500 MB' or '2 GiB'.")
    return amount


class Budget:
    """How many rows fit into a share of memory, from the bytes that rows were seen to take."""

    def __init__(self, memory: int, chunk_size: int | None = None) -> None:
        self.kept = memory // 2  # for gradients that stay: one side of the products
        self.results = memory // 4  # for scores that are ranked and not returned
        self._passing = memory // (4 * _OVERHEAD)
        self._chunk_size = chunk_size
        self._row: dict[object, int] = {}

    def observe(self, kind: object, nbytes: int, rows: int) -> None:
        """Take note of what rows of a kind took; the most is remembered, for sequences differ in length."""
        self._row[kind] = max(self._row.get(kind, 1), -(-nbytes // max(rows, 1)))

    def chunk(self, kind: object) -> int:
        """Return how many rows of a kind to take at a time."""
        if self._chunk_size is not None:
            return self._chunk_size
        if kind not in self._row:
            return _FIRST_ROWS
        return max(1, min(self._passing // self._row[kind], _LARGEST_CHUNK))
