"""One run of `gradreg train`, from the composed configuration to results, table and plots."""

from __future__ import annotations

import logging
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
from gradreg.experiments.environment import choose_device
from gradreg.experiments.evaluate import evaluate, validation_row
from gradreg.experiments.files import read_json, write_json
from gradreg.experiments.lifecycle import Report, carry_out, checked
from gradreg.experiments.loop import train_arm
from gradreg.experiments.rules import train_problems
from gradreg.experiments.run_directory import RunDirectory
from gradreg.experiments.run_id import seedless_hash
from gradreg.experiments.validate import ConfigError

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
    source = checked(plain, train_problems, folder)["data"]
    directory = RunDirectory(folder)
    if not plain["force"]:
        _refuse_other_data(directory, source)
    facts = {"seed": config.seed, "group": seedless_hash(config)}
    return carry_out(directory, config, overrides, facts, lambda: _work(directory, plain, source))


def _work(directory: RunDirectory, config: dict[str, Any], source: Any) -> Report:
    """Train and evaluate all arms that have no results yet, then put all results together."""
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

    def draw() -> None:
        from gradreg.experiments import plots  # slow to import

        plots.draw(directory, results, data)

    return Report(results, report.markdown(results, list(config["regularizers"])), draw)


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


def _refuse_other_data(directory: RunDirectory, source: Any) -> None:
    """Compare with the data of the checkpoints to go on from; without any, the run starts anew on whatever there is."""
    before = directory.read("meta.json") if directory.has_checkpoints or directory.status == "done" else None
    if before is not None and before["data"] != source.fingerprint():
        raise gr.errors.GradregError(
            f"The data changed since the run in {directory.path} began (fingerprint {before['data']}, now "
            f"{source.fingerprint()}). force=true runs it again on the new data."
        )
