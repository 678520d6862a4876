"""Compute what is missing of an index, and open it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from gradreg.errors import GradregError
from gradreg.tracin._data import read_rows
from gradreg.tracin._memory import as_bytes
from gradreg.tracin._passes import opened
from gradreg.tracin._reader import Reader
from gradreg.tracin._spec import Spec
from gradreg.tracin.index._build import build
from gradreg.tracin.index._from_tracin import TracInSource
from gradreg.tracin.index._index import GradientIndex
from gradreg.tracin.index._manifest import Layout, Manifest

_SHARD_BYTES = 2**26  # of one shard at most: what a kill loses, and what a worker holds
_SHARD_ROWS = 4096


def build_index(
    spec: Spec,
    train: Any,
    path: str | Path,
    *,
    memory: int,
    chunk_size: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    workers: int = 1,
    shard_rows: int | None = None,
    max_size: int | str = "20 GiB",
    only_open: bool = False,
) -> GradientIndex:
    """Compute what is missing of an index, and open it; see `TracIn.index`.

    Args:
        spec: What is computed.
        train: Training examples.
        path: The folder.
        memory: Bytes to hold at a time.
        chunk_size: Examples at a time, or None.
        collate: From a list of rows to a batch.
        workers: Processes on this machine.
        shard_rows: Examples per file.
        max_size: Of the index.
        only_open: Compute nothing: refuse an index that is absent or has missing shards.

    Raises:
        GradregError: If it would be larger than `max_size`, or `shard_rows` is below 1.
    """
    folder, rows, limit = Path(path), read_rows(train, collate), as_bytes(max_size)
    if shard_rows is not None and (not isinstance(shard_rows, int) or isinstance(shard_rows, bool) or shard_rows < 1):
        raise GradregError(f"shard_rows={shard_rows!r}; allowed are None and the integers 1, 2, 3, ...")
    with opened(spec) as passes:
        source = TracInSource(passes, Reader(rows, "train", passes.device), memory, chunk_size)
        row_bytes = source.size * passes.dtype.itemsize
        if only_open:
            found = Manifest.read(folder)
            found.refuse_other(Manifest(source.identity(), replace(found.layout, **source.fixed_layout())), folder)
            return GradientIndex(folder, spec, rows, found, memory=memory, collate=collate)
        _refuse_size(source, row_bytes, limit, projected=spec.projection is not None)
        _make(folder)
        manifest = Manifest(source.identity(), _layout(source, row_bytes, shard_rows)).write_or_read(folder)
        with tqdm(desc="Index", unit="shard", disable=None if spec.show_progress else True) as bar:

            def report(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            build(source, folder, manifest, workers=workers, report=report)
    return GradientIndex(folder, spec, rows, manifest, memory=memory, collate=collate)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise GradregError(
            f"The folder {folder} of the index cannot be made ({problem.strerror}). Nothing was computed: give a path that is no "
            "file, in a place that may be written to."
        ) from problem


def _layout(source: TracInSource, row_bytes: int, shard_rows: int | None) -> Layout:
    batch = source.batch_rows
    if shard_rows is None:
        fitting = min(_SHARD_ROWS, _SHARD_BYTES // row_bytes)
        shard_rows = max(1, fitting // batch) * batch  # whole batches
    return Layout(**source.fixed_layout(), shard_rows=shard_rows, batch_rows=min(batch, shard_rows))


def _refuse_size(source: TracInSource, row_bytes: int, limit: int, *, projected: bool) -> None:
    total = source.rows * source.checkpoints * row_bytes
    if total <= limit:
        return
    hint = "a smaller projection" if projected else "projection=gradreg.tracin.TwoSidedProjection()"
    raise GradregError(
        f"The index would take {total / 2**30:.1f} GiB: {source.rows} examples x {source.checkpoints} checkpoints x "
        f"{source.size} numbers of {source.dtype}; max_size is {limit / 2**30:.1f} GiB. Nothing was "
        f"written. Give {hint} or fewer params, "
        "call influence() or top_k() without an index, or raise max_size."
    )
