"""What every job does around its work: check, hold its folder, write down what it is, report, and not run twice."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gradreg.experiments.callbacks import sweeping_here
from gradreg.experiments.environment import choose_device, describe
from gradreg.experiments.failures import Failed, JobFailed, show
from gradreg.experiments.files import write_json, write_text
from gradreg.experiments.reproducible import deterministic
from gradreg.experiments.run_directory import RunDirectory, now
from gradreg.experiments.run_index import write_index
from gradreg.experiments.validate import ConfigError, check

__all__ = ["Report", "carry_out", "checked", "under_hydra"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What the work of a job gave.

    Args:
        results: For `results.json`; `"metric"` is the number for sweepers.
        table: For `results.md`.
        draw: Writes the pictures to `plots/`, where they are wanted.
    """

    results: dict[str, Any]
    table: str
    draw: Callable[[], Any]


def under_hydra(run: Callable[[DictConfig, Path, Sequence[str]], float], config: DictConfig) -> float:
    """Run one job in the directory that Hydra chose.

    A job that fails shows its error here, without Hydra's frames around it. In a sweep the next job follows; otherwise
    the program ends with status 1. Launchers with processes of their own get the exception.
    """
    runtime = HydraConfig.get()
    try:
        return run(config, Path(runtime.runtime.output_dir), list(runtime.overrides.task))
    except Exception as error:
        multirun = runtime.mode is not None and runtime.mode.name == "MULTIRUN"
        if multirun and not sweeping_here():
            raise
        show(error)
        if multirun:
            return Failed(error)
        raise JobFailed(1) from error


def checked(plain: Mapping[str, Any], rules: Callable[[Mapping[str, Any]], list[str]], folder: Path) -> dict[str, Any]:
    """Refuse a wrong configuration, and leave nothing behind then; see `validate.check`."""
    try:
        return check(plain, rules)
    except ConfigError:
        with contextlib.suppress(OSError):  # not empty, or not there
            folder.rmdir()
        raise


def carry_out(
    directory: RunDirectory,
    config: DictConfig,
    overrides: Sequence[str],
    facts: Mapping[str, Any],
    work: Callable[[], Report],
) -> float:
    """Do the work of a checked job in its folder, or show what it gave if it is done.

    Args:
        directory: The folder.
        config: The composed configuration; `threads`, `plots` and `force` are read, and `device` where there is one.
        overrides: What was given on the command line, for the index.
        facts: Further entries of `meta.json`.
        work: Trains and evaluates.

    Returns:
        The metric of the results.
    """
    folder = directory.path
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with directory.working():
            if config.force:
                directory.clear()
            if directory.status == "done":
                log.info("Already done: %s. Nothing was run; force=true runs it again.", folder)
                return _show(directory)
            (folder / "failed.json").unlink(missing_ok=True)
            _begin(directory, config, overrides, facts)
            write_index(folder.parent)
            with deterministic(config.threads):
                _finish(directory, work, bool(config.plots))
            return _show(directory)
    finally:
        write_index(folder.parent)


def _begin(directory: RunDirectory, config: DictConfig, overrides: Sequence[str], facts: Mapping[str, Any]) -> None:
    """Write down what is run and on what, before it runs."""
    before = directory.read("meta.json") or {}
    device = choose_device(config.device) if "device" in config else torch.device("cpu")
    described = describe(device)
    if before and before["versions"] != described["versions"]:
        log.warning(
            "Going on with other versions than before (%s); results may differ in the last digits.", before["versions"]
        )
    meta = {**before, **facts, "overrides": list(overrides), "started": before.get("started", now()), **described}
    write_json(directory.path / "meta.json", meta)
    resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    write_text(directory.path / "config.yaml", OmegaConf.to_yaml(resolved))


def _finish(directory: RunDirectory, work: Callable[[], Report], plots: bool) -> None:
    """Do the work, then write what is made from its results."""
    started = time.perf_counter()
    report = work()
    write_json(directory.path / "results.json", report.results)
    write_text(directory.path / "results.md", report.table)
    if plots:
        report.draw()
    spent = {"finished": now(), "seconds": round(time.perf_counter() - started, 1)}
    write_json(directory.path / "meta.json", {**directory.read("meta.json"), **spent})
    write_json(directory.path / "done.json", {"at": now(), "metric": report.results["metric"]})


def _show(directory: RunDirectory) -> float:
    log.info("\n%s", (directory.path / "results.md").read_text(encoding="utf-8"))
    log.info("Table, plots and all else: %s", directory.path)
    picture = directory.path / "plots" / "results.png"
    if picture.exists():
        log.info("%s", picture)
    return float(directory.read("results.json")["metric"])
