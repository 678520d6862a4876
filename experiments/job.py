"""One run of `gradreg train`, from the composed configuration to results, table and plots."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tqdm.contrib.logging import logging_redirect_tqdm

import gradreg as gr
from gradreg.experiments import report
from gradreg.experiments.arms import make_arm, plan_arms
from gradreg.experiments.data import Data
from gradreg.experiments.environment import choose_device, describe
from gradreg.experiments.evaluate import evaluate, validation_row
from gradreg.experiments.files import read_json, write_json, write_text
from gradreg.experiments.loop import train_arm
from gradreg.experiments.reproducible import deterministic
from gradreg.experiments.rules import train_problems
from gradreg.experiments.run_directory import RunDirectory, now
from gradreg.experiments.run_id import seedless_hash
from gradreg.experiments.run_index import write_index
from gradreg.experiments.validate import ConfigError, check

__all__ = ["run"]

log = logging.getLogger(__name__)


def run(config: DictConfig, folder: Path, overrides: Sequence[str] = ()) -> float:
    """Run a job, go on with it, or report what it gave if it is done.

    Args:
        config: The composed configuration.
        folder: The run directory.
        overrides: What was given on the command line, for the index.

    Returns:
        The mean accuracy over parts of the chosen heads (see `report.combine`), for sweepers.

    Raises:
        ConfigError: If the configuration is wrong; nothing is left behind then.
    """
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]  # a mapping, as the file is one
    try:
        source = check(plain, train_problems)["data"]
    except ConfigError:
        with contextlib.suppress(OSError):  # not empty, or not there
            folder.rmdir()
        raise
    directory = RunDirectory(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not plain["force"]:
        _refuse_other_data(directory, source)
    try:
        with directory.working():
            if plain["force"]:
                directory.clear()
            if directory.status == "done":
                log.info("Already done: %s. Nothing was run; force=true runs it again.", folder)
                return _show(directory)
            (folder / "failed.json").unlink(missing_ok=True)
            _begin(directory, config, source, overrides)
            write_index(folder.parent)
            with deterministic(plain["threads"]):
                _work(directory, plain, source)
            return _show(directory)
    finally:
        write_index(folder.parent)


def _work(directory: RunDirectory, config: dict[str, Any], source: Any) -> None:
    """Train and evaluate all arms that have no results yet, then write what is made from all results."""
    started = time.perf_counter()
    device = choose_device(config["device"])
    data: Data = source.load(upper_bounds=bool(config["upper_bound"])).to(device)
    # Now, not earlier: data that were refused may be corrected and tried again.
    write_json(directory.path / "meta.json", {**directory.read("meta.json"), "data": source.fingerprint()})
    if config["batch_size"] > len(data.train):
        raise ConfigError(f"batch_size: {config['batch_size']} is more than the {len(data.train)} training examples.")
    plan = plan_arms(config, tuple(part for part in data.parts if part in data.upper_bounds))
    if not plan:
        raise ConfigError("arms: nothing to train; no arm is selected and the data bring no upper-bound training sets.")
    found = {name: result for name in plan if (result := read_json(directory.arm(name).results)) is not None}
    for name, node in plan.items():
        if name not in found:
            found[name] = _train(name, node, directory, config, data, device, finished=set(found))
            write_json(directory.arm(name).results, found[name])
    results = report.combine({name: found[name] for name in plan}, data.parts, data.selection, config["seed"])
    write_json(directory.path / "results.json", results)
    write_text(directory.path / "results.md", report.markdown(results, list(config["regularizers"])))
    if config["plots"]:
        from gradreg.experiments.plots import draw  # slow to import

        draw(directory, results, data)
    spent = {"finished": now(), "seconds": round(time.perf_counter() - started, 1)}
    write_json(directory.path / "meta.json", {**directory.read("meta.json"), **spent})
    write_json(directory.path / "done.json", {"at": now(), "metric": results["metric"]})


def _train(
    name: str,
    node: dict[str, Any],
    directory: RunDirectory,
    config: dict[str, Any],
    data: Data,
    device: torch.device,
    finished: set[str],
) -> dict[str, Any]:
    """Train and evaluate one arm, from its last checkpoint if there is one."""
    arm, folder, part = make_arm(name, node, config, data, device), directory.arm(name), node["part"]
    reached = folder.reached()
    if reached:
        log.info("%s: going on after step %d", name, reached)
    # rows of this arm beyond the checkpoint will be written anew
    directory.metrics.keep(lambda row: row["arm"] in finished or (row["arm"] == name and row["step"] <= reached))
    watched = data.validation if part is None else {part: data.validation[part]}
    try:
        with logging_redirect_tqdm():
            seconds, notes = train_arm(
                arm, folder, directory.metrics, config, lambda: validation_row(arm.model, watched)
            )
    except gr.errors.NonFiniteLossError as error:
        error.add_note(f"This happened in arm {name!r} of {directory.path}; its last checkpoint is from before.")
        raise
    result = evaluate(arm.model, data)
    scores = " ".join(f"{p} {result['parts'][p]['test']:.3f}" for p in watched)
    log.info("%s: %d steps in %.0f s; best head per part: %s", name, arm.steps, seconds, scores)
    return {**result, "notes": notes, "seconds": round(seconds, 1), "steps": arm.steps}


def _begin(directory: RunDirectory, config: DictConfig, source: Any, overrides: Sequence[str]) -> None:
    """Write down what is run and on what, before it runs."""
    before = directory.read("meta.json") or {}
    described = describe(choose_device(config.device))
    if before and before["versions"] != described["versions"]:
        log.warning(
            "Going on with other versions than before (%s); results may differ in the last digits.", before["versions"]
        )
    meta = {
        "seed": config.seed,
        "group": seedless_hash(config),
        "data": before.get("data"),  # known once they are read
        "overrides": list(overrides),
        "started": before.get("started", now()),
        **described,
    }
    write_json(directory.path / "meta.json", meta)
    resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    write_text(directory.path / "config.yaml", OmegaConf.to_yaml(resolved))


def _refuse_other_data(directory: RunDirectory, source: Any) -> None:
    """Compare with the data of the checkpoints to go on from; without any, the run starts anew on whatever there is."""
    before = directory.read("meta.json") if directory.has_checkpoints or directory.status == "done" else None
    if before is not None and before["data"] != source.fingerprint():
        raise gr.errors.GradregError(
            f"The data changed since the run in {directory.path} began (fingerprint {before['data']}, now "
            f"{source.fingerprint()}). force=true runs it again on the new data."
        )


def _show(directory: RunDirectory) -> float:
    log.info("\n%s", (directory.path / "results.md").read_text(encoding="utf-8"))
    log.info("Table, plots and checkpoints: %s", directory.path)
    picture = directory.path / "plots" / "results.png"
    if picture.exists():
        log.info("%s", picture)
    return float(directory.read("results.json")["metric"])
