"""Files that are either whole or absent, and locks that end with their process."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradreg._files import not_written

__all__ = ["locked", "read_json", "write_atomically", "write_json", "write_text"]


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file next to `path`, then move it into place.

    The temporary name ends like the real one, since some writers choose the format by the ending.

    Raises:
        GradregError: If the system lets nothing be written there.
    """
    temporary = path.with_name(f".{os.getpid()}.tmp.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as problem:
        raise not_written(path, problem) from problem


def write_text(path: Path, text: str) -> None:
    """Write a text file as a whole."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as a whole; NaN is refused, for it is not JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file, or None when there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock that the system releases when the process ends, however it ends.

    Yields:
        Whether the lock was taken; always true with `wait`, and where the system has no such locks.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
