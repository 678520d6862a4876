"""Reading the rows of one side, several times, and noticing when they change in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from gradreg.batch import Batch
from gradreg.errors import BatchError, NonFiniteLossError
from gradreg.tracin._rows import RowId, Rows

__all__ = ["Reader"]


class Reader:
    """Rows of one side ("train" or "test") during one computation."""

    def __init__(self, rows: Rows, side: str, device: torch.device) -> None:
        self.rows, self.side = rows, side
        self._device = device
        self._hashes = np.zeros(0 if rows.stable else len(rows), dtype=np.uint64)
        self._seen = np.zeros(len(self._hashes), dtype=bool)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, positions: Sequence[int]) -> Batch:
        """Return the examples at some positions, on the device of the model.

        Raises:
            BatchError: If an example is not what it was when it was read before.
        """
        if self.rows.stable:
            return self.rows.batch(positions).to(self._device)
        batch, hashes = self.rows.read(positions)
        index = np.asarray(positions)
        changed = index[self._seen[index] & (self._hashes[index] != hashes)]
        if len(changed):
            raise BatchError(
                f"{self.name(int(changed[0]))} is another example than when it was read before. Scores add up over checkpoints, "
                "so every reading must give the same: switch random augmentations off, or store the examples."
            )
        self._hashes[index], self._seen[index] = hashes, True
        return batch.to(self._device)

    def name(self, position: int) -> str:
        """Return a row in words."""
        where: RowId = self.rows.identity(position)
        part = f" of dataset {where.dataset!r}" if where.dataset != 0 else ""
        return f"{self.side} row {where.row}{part}"

    def refuse_broken(self, positions: Iterable[int]) -> None:
        """Raise an error that names rows whose gradient is NaN or infinite, if there are any."""
        broken = list(positions)
        if broken:
            rest = f" (and {len(broken) - 3} more)" if len(broken) > 3 else ""
            raise NonFiniteLossError(
                f"The gradient of {', '.join(self.name(position) for position in broken[:3])}{rest} is NaN or infinite. Nothing "
                "was scored: look at the example, or leave it out (torch.utils.data.Subset)."
            )
