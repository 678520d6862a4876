"""Files that are either whole or absent, also after a crash."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradreg.errors import GradregError

__all__ = ["not_written", "sync_folder", "write_durably"]


def write_durably(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file, bring it to the disk, then move it into place.

    Raises:
        GradregError: If the system lets nothing be written there.
    """
    temporary = path.with_name(f".{os.getpid()}.tmp.{path.name}") if path.name else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            with temporary.open("rb+") as handle:
                os.fsync(handle.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as problem:
        raise not_written(path, problem) from problem


def not_written(path: Path, problem: OSError) -> GradregError:
    """Return the error of a file that could not be written."""
    return GradregError(
        f"{str(path)!r} cannot be written ({problem.strerror or problem}). Give the path of a file, in a folder that you may "
        "write to, on a disk with room."
    )


def sync_folder(folder: Path) -> None:
    """Bring a rename to the disk; not every system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
