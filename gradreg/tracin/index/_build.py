"""Workers: each claims shards that nobody holds, until all are there; they share nothing but the folder."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from gradreg.errors import GradregError, GradregWarning, warn
from gradreg.tracin.index._files import claim, remove_leftovers
from gradreg.tracin.index._manifest import Manifest
from gradreg.tracin.index._shards import Shards
from gradreg.tracin.index._source import RowReader, Source

Report = Callable[[int, int], None]
"""Called with the number of finished shards and of all."""

_POLL_SECONDS = (0.05, 1.0)  # first and longest wait for shards that other workers hold


def build(source: Source, folder: Path, manifest: Manifest, *, workers: int = 1, report: Report | None = None) -> None:
    """Compute all shards that are missing or damaged; return when the index is complete.

    Every worker computes on one thread of torch, for sums may differ in their last bits with the number of threads.

    Args:
        source: Where gradients come from.
        folder: Of the index.
        manifest: As on disk.
        workers: Processes on this machine, this one included. Others may work on the same folder at the same time.
        report: Told about progress.

    Raises:
        GradregError: If `workers` is below 1.
    """
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise GradregError(f"workers={workers!r}; allowed are the integers 1, 2, 3, ...")
    remove_leftovers(folder / "shards")
    todo = sum(Shards(folder, manifest).problem(*one, thorough=False) is not None for one in manifest.layout.shards())
    helpers = min(workers, todo) - 1
    rank, world = _place_among_machines()
    with (
        _single_thread(),
        _helpers(helpers, lambda n: _work(source, folder, manifest, (rank + n / (helpers + 1)) / world)),
    ):
        _work(source, folder, manifest, rank / world, report)


def _work(source: Source, folder: Path, manifest: Manifest, share: float, report: Report | None = None) -> None:
    """Compute shards, beginning at a share (0 to 1) of them, until none is missing."""
    shards = Shards(folder, manifest)
    order = manifest.layout.shards()
    first = int(share * len(order))
    open_, wait = order[first:] + order[:first], _POLL_SECONDS[0]
    with contextlib.ExitStack() as stack:
        reader: RowReader | None = None
        loaded: int | None = None
        while open_:
            left = []
            for checkpoint, start, stop in open_:
                why = shards.problem(checkpoint, start, stop, thorough=True)
                if why is None:
                    continue
                name = shards.path(checkpoint, start).stem
                with claim(folder / "claims" / name) as mine:
                    if not mine:
                        left.append((checkpoint, start, stop))
                        continue
                    if shards.problem(checkpoint, start, stop, thorough=True) is None:
                        continue  # finished by another between the two looks
                    if why != "missing":
                        path = shards.path(checkpoint, start)
                        warn(f"{path} is {why}; it was not used and is built again.", GradregWarning)
                    if reader is None or loaded != checkpoint:
                        stack.close()
                        reader, loaded = stack.enter_context(source.at(checkpoint)), checkpoint
                    shards.write(checkpoint, start, stop, *_rows(reader, start, stop, manifest.layout.batch_rows))
                    wait = _POLL_SECONDS[0]
                if report is not None:
                    report(_finished(shards, order), len(order))
            if left:  # held by others, who may die: look again
                time.sleep(wait)
                wait = min(2 * wait, _POLL_SECONDS[1])
            open_ = left
    if report is not None:
        report(len(order), len(order))


def _finished(shards: Shards, order: list[tuple[int, int, int]]) -> int:
    return sum(shards.path(checkpoint, start).exists() for checkpoint, start, _ in order)


def _rows(reader: RowReader, start: int, stop: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the rows of a shard, in batches that begin at its first row whoever computes them."""
    parts = [reader(begin, min(begin + step, stop)) for begin in range(start, stop, step)]
    vectors, squared_norms = zip(*parts, strict=True)
    return torch.cat(vectors), torch.cat(squared_norms)


def _place_among_machines() -> tuple[int, int]:
    """Return rank and world size as torchrun sets them; only where a worker begins depends on it."""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if rank.isdigit() and world.isdigit() and int(rank) < int(world):
        return int(rank), int(world)
    return 0, 1


@contextlib.contextmanager
def _single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _helpers(count: int, work: Callable[[int], None]) -> Iterator[None]:
    """Run `work(1) ... work(count)` in processes of their own; shards of one that fails are taken by the others."""
    if count < 1:
        yield
        return
    if "fork" not in multiprocessing.get_all_start_methods() or torch.cuda.is_initialized():
        raise GradregError(
            "workers= starts copies of this process, which this system (or CUDA, once used) does not allow. Start the same "
            "program several times instead, for example with torchrun --nproc-per-node; they share the work."
        )
    context = multiprocessing.get_context("fork")  # models and functions of users need not be picklable
    processes: list[BaseProcess] = [context.Process(target=work, args=(n,), daemon=True) for n in range(1, count + 1)]
    for process in processes:
        process.start()
    try:
        yield
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.join()
