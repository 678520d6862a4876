"""What an index is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

RowReader = Callable[[int, int], tuple[Tensor, Tensor]]
"""From a range of rows, `start` and `stop`, to vectors `[rows, size]` and squared norms `[rows]`."""


class Source(Protocol):
    """Training gradients, per checkpoint and range of rows."""

    rows: int
    checkpoints: int
    size: int
    dtype: str

    @property
    def batch_rows(self) -> int:
        """Examples per forward and backward."""

    def identity(self) -> Mapping[str, Any]:
        """Return fingerprints of all that decides the numbers, as plain values."""

    def at(self, checkpoint: int) -> AbstractContextManager[RowReader]:
        """Load a checkpoint for the duration of a context."""
