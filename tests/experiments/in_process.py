"""The command line in this process: what is started anew imports for seconds, and only few tests are about that."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from hydra.core.global_hydra import GlobalHydra

from gradreg.experiments import callbacks, cli


@dataclass(frozen=True)
class Finished:
    """What `subprocess.run` returns, as far as tests look at it."""

    returncode: int
    stdout: str
    stderr: str


def call(folder: Path, *arguments: str, module: str | None = None) -> Finished:
    """Run `gradreg *arguments` in a folder, or with `module` what `python -m module *arguments` runs."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), _as_a_program(folder, arguments):
        try:
            status = cli.main(arguments) if module is None else _main_of(module)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Finished(status, output.getvalue(), errors.getvalue())


def _main_of(module: str) -> int:
    # unlike in a fresh process, it was imported before
    warnings.filterwarnings("ignore", "'gradreg.* found in sys.modules", RuntimeWarning)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


@contextlib.contextmanager
def _as_a_program(folder: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Another folder, arguments and environment; what Hydra leaves in the process is taken back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["gradreg", *arguments]),
        mock.patch.dict(os.environ, {"COLUMNS": "120"}),
        mock.patch.object(callbacks, "_process", None),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")  # of a program; the tests' own filter raises
        GlobalHydra.instance().clear()
        try:
            yield
        finally:
            GlobalHydra.instance().clear()
            root.handlers[:] = handlers
            root.setLevel(level)
