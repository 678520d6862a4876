"""Shards: one safetensors file per checkpoint and range of rows, checked before it is believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gradreg._files import write_durably
from gradreg.errors import GradregError
from gradreg.tracin.index._manifest import Layout, Manifest

_TORCH = {"float32": torch.float32, "float64": torch.float64}
_LETTERS = {"float32": "F32", "float64": "F64"}
_CHUNK = 2**22  # bytes read at a time while a checksum is taken


class DamagedIndexError(GradregError):
    """An index with shards that are missing, truncated, changed or of another index; they are named, never read."""


class Shards:
    """The shards of an index.

    Args:
        folder: Of the index.
        manifest: Its manifest; shards that carry another key are foreign.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder / "shards"
        self.layout: Layout = manifest.layout
        self._key = manifest.key
        self._believed: set[Path] = set()  # checksums taken in this process

    def path(self, checkpoint: int, start: int) -> Path:
        """Return where a shard lies."""
        return self.folder / f"checkpoint-{checkpoint:03d}-row-{start:09d}.safetensors"

    def write(self, checkpoint: int, start: int, stop: int, vectors: Tensor, squared_norms: Tensor) -> None:
        """Write a shard as a whole.

        Args:
            checkpoint: Its number.
            start: First row.
            stop: One behind the last row.
            vectors: `[stop - start, size]`.
            squared_norms: Of the unprojected gradients, `[stop - start]`.
        """
        tensors = {"squared_norms": squared_norms.double().contiguous().cpu(), "vectors": vectors.contiguous().cpu()}
        about = {**self._about(checkpoint, start, stop), "sha256": _digest(tensors)}
        # one entry, for the order of several in the file is left to chance
        metadata = {"gradreg": json.dumps(about, sort_keys=True)}
        write_durably(self.path(checkpoint, start), lambda path: save_file(tensors, path, metadata=metadata))

    def problem(self, checkpoint: int, start: int, stop: int, *, thorough: bool) -> str | None:
        """Return what is wrong with a shard, or None.

        Args:
            checkpoint: Its number.
            start: First row.
            stop: One behind the last row.
            thorough: Take the checksum of the numbers too, unless this process did before.
        """
        path = self.path(checkpoint, start)
        try:
            header, data_start = _header(path)
        except FileNotFoundError:
            return "missing"
        except _UnreadableError as error:
            return str(error)
        about = _about_of(header)
        digest = about.pop("sha256", None)
        if about != self._about(checkpoint, start, stop):
            return "of another index" if about.get("index") != self._key else "of other rows"
        rows, letters = stop - start, _LETTERS[self.layout.dtype]
        found = {name: (item["dtype"], item["shape"]) for name, item in header.items() if name != "__metadata__"}
        if found != {"vectors": (letters, [rows, self.layout.size]), "squared_norms": ("F64", [rows])}:
            return f"of other contents ({found})"
        if thorough and path not in self._believed:
            if _digest_of_file(path, header, data_start) != digest:
                return "changed since it was written (checksum)"
            self._believed.add(path)
        return None

    def refuse_damage(self, *, thorough: bool = False) -> None:
        """Check all shards.

        Raises:
            DamagedIndexError: Names those that cannot be believed.
        """
        shards = self.layout.shards()
        bad = [(one, why) for one in shards if (why := self.problem(*one, thorough=thorough)) is not None]
        if bad:
            listed = "\n".join(f"  {self.path(c, start).name}: {why}" for (c, start, _), why in bad[:10])
            more = f"\n  ... and {len(bad) - 10} more" if len(bad) > 10 else ""
            raise DamagedIndexError(
                f"{len(bad)} of {len(shards)} shards of {self.folder.parent} cannot be used:\n{listed}{more}\nNothing was read. "
                "TracIn.index(train, path) builds these shards again and keeps the others."
            )

    def squared_norms(self) -> Tensor:
        """Return the squared norms of the unprojected gradients, `[checkpoints, rows]` in float64."""
        result = torch.empty(self.layout.checkpoints, self.layout.rows, dtype=torch.float64)
        for checkpoint, start, stop in self.layout.shards():
            self._believe(checkpoint, start, stop)
            header, data_start = _header(self.path(checkpoint, start))
            begin, end = header["squared_norms"]["data_offsets"]
            with self.path(checkpoint, start).open("rb") as handle:
                handle.seek(data_start + begin)
                part = torch.frombuffer(bytearray(handle.read(end - begin)), dtype=torch.float64)
            result[checkpoint, start:stop] = part
        return result

    def chunks(self, max_bytes: int) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Yield `(start, stop, vectors of every checkpoint [stop - start, size])`, in the order of the rows.

        The tensors share one buffer, which the next step overwrites; so memory does not grow with the index.
        """
        layout = self.layout
        rows = max(1, min(layout.shard_rows, max_bytes // max(1, layout.row_bytes)))
        buffers = [torch.empty(rows, layout.size, dtype=_TORCH[layout.dtype]) for _ in range(layout.checkpoints)]
        for shard_start in range(0, layout.rows, layout.shard_rows):
            shard_stop = min(shard_start + layout.shard_rows, layout.rows)
            for start in range(shard_start, shard_stop, rows):
                stop = min(start + rows, shard_stop)
                for checkpoint, buffer in enumerate(buffers):
                    self._believe(checkpoint, shard_start, shard_stop)
                    self._read(checkpoint, shard_start, start, buffer[: stop - start])
                yield start, stop, [buffer[: stop - start] for buffer in buffers]

    def gather(self, rows: list[int]) -> list[Tensor]:
        """Return the vectors of some rows, per checkpoint `[len(rows), size]`."""
        layout = self.layout
        result = [torch.empty(len(rows), layout.size, dtype=_TORCH[layout.dtype]) for _ in range(layout.checkpoints)]
        for checkpoint, part in enumerate(result):
            for place, row in enumerate(rows):
                shard_start = row - row % layout.shard_rows
                self._believe(checkpoint, shard_start, min(shard_start + layout.shard_rows, layout.rows))
                self._read(checkpoint, shard_start, row, part[place : place + 1])
        return result

    def _read(self, checkpoint: int, shard_start: int, start: int, into: Tensor) -> None:
        """Read rows straight into a tensor; a memory map would count every page ever touched as resident."""
        path = self.path(checkpoint, shard_start)
        header, data_start = _header(path)
        view = memoryview(into.numpy().data).cast("B")
        with path.open("rb", buffering=0) as handle:
            row_bytes = self.layout.size * into.element_size()
            handle.seek(data_start + header["vectors"]["data_offsets"][0] + (start - shard_start) * row_bytes)
            done = 0
            while done < len(view):
                count = handle.readinto(view[done:])
                if not count:
                    raise DamagedIndexError(
                        f"{path} ended early; another process changes this index. Nothing was used."
                    )
                done += count

    def _believe(self, checkpoint: int, start: int, stop: int) -> None:
        if self.path(checkpoint, start) in self._believed:
            return
        why = self.problem(checkpoint, start, stop, thorough=True)
        if why is not None:
            raise DamagedIndexError(
                f"{self.path(checkpoint, start)} is {why}. It was not used; TracIn.index(train, path) builds it again."
            )

    def _about(self, checkpoint: int, start: int, stop: int) -> dict[str, Any]:
        return {"index": self._key, "checkpoint": checkpoint, "start": start, "stop": stop}


class _UnreadableError(Exception):
    pass


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file and where its data start, after checking that all of them are there."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise _UnreadableError(f"truncated ({size} bytes)")
        try:
            header: dict[str, Any] = json.loads(handle.read(length))
            end = max(item["data_offsets"][1] for name, item in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError) as error:
            raise _UnreadableError("not a safetensors file") from error
    if size != 8 + length + end:
        raise _UnreadableError(f"truncated ({size} of {8 + length + end} bytes)")
    return header, 8 + length


def _about_of(header: dict[str, Any]) -> dict[str, Any]:
    """Return what a shard says about itself; nothing if another program wrote the file."""
    try:
        about = json.loads(header["__metadata__"]["gradreg"])
    except (KeyError, TypeError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(memoryview(tensors[name].numpy().data).cast("B") if tensors[name].numel() else b"")
    return digest.hexdigest()


def _digest_of_file(path: Path, header: dict[str, Any], data_start: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as handle:
        for name in sorted(set(header) - {"__metadata__"}):
            begin, end = header[name]["data_offsets"]
            handle.seek(data_start + begin)
            left = end - begin
            while left:
                part = handle.read(min(_CHUNK, left))
                digest.update(part)
                left -= len(part)
    return digest.hexdigest()
