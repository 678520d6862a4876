"""One folder per run: what is in it, and in which state it is."""

from __future__ import annotations

import contextlib
import shutil
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gradreg as gr
from gradreg.experiments.checkpoints import ArmFolder
from gradreg.experiments.files import locked, read_json, write_json
from gradreg.experiments.metrics import Metrics

__all__ = ["RunDirectory", "now"]


def now() -> str:
    """Return the time, to the second, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class RunDirectory:
    """The files of a run.

    `config.yaml` (resolved), `overrides.txt`, `meta.json`, `metrics.jsonl`, `arms/<arm>/` (checkpoints, state to
    resume from, results), `results.json`, `results.md`, `plots/`, and at the end `done.json` or `failed.json`.
    Each file is whole or absent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Metrics(path / "metrics.jsonl")

    @property
    def status(self) -> str:
        """`"done"`, `"failed"`, `"unfinished"` (interrupted or running) or `"new"`."""
        for status in ("done", "failed"):
            if (self.path / f"{status}.json").exists():
                return status
        return "unfinished" if (self.path / "meta.json").exists() else "new"

    @property
    def has_checkpoints(self) -> bool:
        """Whether some training got as far as a checkpoint."""
        return any(self.path.glob("arms/*/resume.pt"))

    def read(self, name: str) -> Any:
        """Read one of the JSON files, or None when it is absent."""
        return read_json(self.path / name)

    def arm(self, name: str) -> ArmFolder:
        """Return the folder of an arm."""
        return ArmFolder(self.path / "arms" / name, name)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Hold the folder for this process, and write `failed.json` if an exception passes.

        Raises:
            GradregError: If another process works here.
        """
        with locked(self.path / ".lock", wait=False) as free:
            if not free:
                raise gr.errors.GradregError(
                    f"Another process is working in {self.path}. Wait for it, or stop it first."
                )
            try:
                yield
            except Exception as error:
                report = {"error": f"{type(error).__name__}: {error}", "at": now(), "traceback": traceback.format_exc()}
                write_json(self.path / "failed.json", report)
                raise

    def clear(self) -> None:
        """Remove what an earlier run left, and nothing else."""
        for name in ("arms", "plots"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in ("done.json", "failed.json", "results.json", "results.md", "metrics.jsonl", "meta.json"):
            (self.path / name).unlink(missing_ok=True)
