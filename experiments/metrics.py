"""metrics.jsonl: one JSON object per line, appended while training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradreg.experiments.files import write_text

__all__ = ["Metrics"]


class Metrics:
    """Rows of numbers by arm and step.

    No times are written, so two equal runs have equal files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, at once."""
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Read all whole rows; a last line that was cut off is left out."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop all rows but the wanted ones."""
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in self.rows() if wanted(row)))
