"""The manifest: what an index was made from, and how it is cut into shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradreg.errors import GradregError
from gradreg.tracin.index._files import write_json_once

FORMAT = 1
FILE = "manifest.json"


class IndexMismatchError(GradregError):
    """An index that belongs to another model, other checkpoints, data or settings; every difference is listed."""


@dataclass(frozen=True)
class Layout:
    """How the rows are cut. Fixed when an index begins, since the last bits of sums depend on it.

    Args:
        rows: Training examples.
        checkpoints: Number of checkpoints.
        size: Numbers per example and checkpoint.
        dtype: Of the numbers: `"float32"` or `"float64"`.
        shard_rows: Examples per shard.
        batch_rows: Examples per forward and backward.
    """

    rows: int
    checkpoints: int
    size: int
    dtype: str
    shard_rows: int
    batch_rows: int

    def shards(self) -> list[tuple[int, int, int]]:
        """Return `(checkpoint, start, stop)` of all shards; those of a checkpoint lie together, so it is loaded once."""
        starts = range(0, self.rows, self.shard_rows)
        return [(c, s, min(s + self.shard_rows, self.rows)) for c in range(self.checkpoints) for s in starts]

    @property
    def row_bytes(self) -> int:
        """Bytes of the numbers of one example, over all checkpoints."""
        return self.checkpoints * self.size * (8 if self.dtype == "float64" else 4)


@dataclass(frozen=True)
class Manifest:
    """Identity and layout of an index.

    Args:
        identity: Plain values, nested: fingerprints of model, checkpoints and data, the settings and the projection.
        layout: How the rows are cut.
    """

    identity: Mapping[str, Any]
    layout: Layout

    @property
    def key(self) -> str:
        """A hash of everything; every shard carries it."""
        return hashlib.sha256(json.dumps(self._plain(), sort_keys=True).encode()).hexdigest()

    def _plain(self) -> dict[str, Any]:
        return {"format": FORMAT, "identity": dict(self.identity), "layout": asdict(self.layout)}

    def write_or_read(self, folder: Path) -> Manifest:
        """Write the manifest of a new index, or go on with the one that is there.

        Returns:
            The manifest on disk. Shard and batch sizes are its own, whatever was asked now.

        Raises:
            IndexMismatchError: If it belongs to something else.
        """
        file = folder / FILE
        if not file.exists():
            foreign = [path.name for path in folder.iterdir()] if folder.is_dir() else []
            if any(not name.startswith(".") for name in foreign) and not file.exists():
                raise GradregError(
                    f"{folder} is not empty and holds no index ({', '.join(sorted(foreign)[:3])}). Nothing was changed; give "
                    "another folder."
                )
            write_json_once(file, self._plain())
        found = Manifest.read(folder)
        found.refuse_other(self, folder)
        return found

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of an index.

        Raises:
            GradregError: If there is none, or a newer format.
        """
        file = folder / FILE
        try:
            plain = json.loads(file.read_text(encoding="utf-8"))
            if plain["format"] != FORMAT:
                raise GradregError(
                    f"{file} has the format {plain['format']}; this version reads {FORMAT}. Build the index again."
                )
            return Manifest(plain["identity"], Layout(**plain["layout"]))
        except FileNotFoundError:
            raise GradregError(
                f"{folder} holds no index: there is no {FILE}. TracIn.index(train, path) makes one."
            ) from None
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise GradregError(
                f"{file} is damaged ({error}). Its shards cannot be trusted; remove {folder} and build it again."
            ) from error

    def refuse_other(self, wanted: Manifest, folder: Path) -> None:
        """Compare with what is wanted now.

        Raises:
            IndexMismatchError: Names every difference.
        """
        mine, theirs = dict(_flat(self._compared())), dict(_flat(json.loads(json.dumps(wanted._compared()))))
        lines = [
            f"  {name}: {_short(mine.get(name))} in the index, {_short(theirs.get(name))} now"
            for name in dict.fromkeys([*mine, *theirs])
            if mine.get(name) != theirs.get(name)
        ]
        if lines:
            listed = "\n".join(lines[:20] + ([f"  ... and {len(lines) - 20} more"] if len(lines) > 20 else []))
            raise IndexMismatchError(
                f"The index in {folder} was made from something else:\n{listed}\nNothing was changed. Give what it was made "
                "from, or another folder for a new index."
            )

    def _compared(self) -> dict[str, Any]:
        layout = {
            name: value for name, value in asdict(self.layout).items() if name not in ("shard_rows", "batch_rows")
        }
        return {**self.identity, "layout": layout}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    items: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield prefix, value
        return
    for key, item in items:
        yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
