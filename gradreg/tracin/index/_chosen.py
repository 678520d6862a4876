"""Some of the rows of a dataset, as rows of their own."""

from __future__ import annotations

from typing import Any

from gradreg.tracin._rows import Rows


class ChosenRows(Rows):
    """Some rows of others, in their order."""

    def __init__(self, rows: Rows, chosen: list[int]) -> None:
        self._rows, self._chosen = rows, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def stable(self) -> bool:
        return self._rows.stable

    def identity(self, position: int) -> Any:
        return self._rows.identity(self._chosen[position])

    def batch(self, positions: Any) -> Any:
        return self._rows.batch([self._chosen[position] for position in positions])

    def read(self, positions: Any) -> Any:
        return self._rows.read([self._chosen[position] for position in positions])

    def hashes(self, positions: Any) -> Any:
        return self._rows.hashes([self._chosen[position] for position in positions])
