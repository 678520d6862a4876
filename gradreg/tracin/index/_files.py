"""Files that are whole or absent, also after the power failed, and claims that end with their process."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradreg._files import sync_folder


def write_json_once(path: Path, value: Any) -> None:
    """Write a JSON file unless there is one already: of several writers the first wins, and nobody sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.tmp.{path.name}")
    try:
        with temporary.open("w", encoding="utf-8") as handle:
            handle.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        with contextlib.suppress(FileExistsError):
            try:
                os.link(temporary, path)  # fails if the name is taken, which os.replace does not
            except (PermissionError, NotImplementedError, OSError) as error:
                if isinstance(error, FileExistsError):
                    raise
                if not path.exists():  # a file system without links
                    os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of processes that no longer live on this machine."""
    for path in folder.glob(".*.tmp.*") if folder.is_dir() else ():
        owner = path.name.split(".")[1]
        if owner.isdigit() and not _alive(int(owner)):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Hold a piece of work for this process if no other does; the system frees it when the process ends, however it ends.

    Where the system has no such locks every claim succeeds: work may then be done twice, with equal results.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a network file system without locks
            yield True
            return
        yield True
        # Whoever opened the file meanwhile finds the work done, so the name may go.
        path.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
