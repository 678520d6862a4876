"""The training loop: steps, rows of metrics, checkpoints, and going on after an interruption."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tqdm.auto import tqdm

from gradreg.experiments.arms import Arm
from gradreg.experiments.checkpoints import ArmFolder
from gradreg.experiments.metrics import Metrics
from gradreg.experiments.notes import collected_notes
from gradreg.experiments.reproducible import batch_indices, random_state, restore_random_state

__all__ = ["take_step", "train_arm"]


def take_step(arm: Arm, step: int, config: Mapping[str, Any]) -> dict[str, float]:
    """Take one optimizer step and return what the objective logged, and the learning rate."""
    index = batch_indices(config["seed"], step, len(arm.train), config["batch_size"])
    batch = arm.train[index.to(arm.train.inputs.device)]
    arm.optimizer.zero_grad()
    loss, logs = arm.goal(arm.model, batch)
    loss.backward()
    arm.optimizer.step()
    row = {name: float(value) for name, value in logs.items()}
    row["learning_rate"] = float(arm.optimizer.param_groups[0]["lr"])
    if arm.proximal is not None:
        arm.proximal(arm.model, row["learning_rate"])
    if arm.schedule is not None:
        arm.schedule.step()
    return row


def train_arm(
    arm: Arm, folder: ArmFolder, metrics: Metrics, config: Mapping[str, Any], measure: Callable[[], dict[str, float]]
) -> tuple[float, list[str]]:
    """Train an arm from its last checkpoint, or from the start, to its last step.

    Args:
        arm: Changed in place.
        folder: Where checkpoints go.
        metrics: Where rows go.
        config: The whole configuration, resolved.
        measure: Gives accuracies on validation data, for the rows.

    Returns:
        Seconds of training, and the notes (warnings about the penalty) that came up.
    """
    first, seconds, notes = _resume(arm, folder)
    arm.model.train()
    bar = tqdm(
        range(first, arm.steps),
        desc=arm.name,
        initial=first,
        total=arm.steps,
        unit="step",
        disable=None if config["progress"] else True,  # None: shown on a terminal only
    )
    started = time.perf_counter()
    with collected_notes(notes):
        for step in bar:
            row = take_step(arm, step, config)
            done = step + 1
            last = done == arm.steps
            evaluated = last or done % config["evaluate_every"] == 0
            if evaluated or done % config["log_every"] == 0:
                bar.set_postfix({name: f"{row[name]:.3g}" for name in ("loss", "task") if name in row}, refresh=False)
                metrics.append({"arm": arm.name, "step": done, **row, **(measure() if evaluated else {})})
            if last or done % config["checkpoint_every"] == 0:
                elapsed = seconds + time.perf_counter() - started
                folder.save(arm.model, _state(arm, done, elapsed, notes), row["learning_rate"])
    return seconds + time.perf_counter() - started, notes


def _state(arm: Arm, step: int, seconds: float, notes: list[str]) -> dict[str, Any]:
    return {
        "step": step,
        "optimizer": arm.optimizer.state_dict(),
        "schedule": arm.schedule.state_dict() if arm.schedule is not None else None,
        "goal": arm.goal.state_dict(),
        "random": random_state(),
        "seconds": seconds,
        "notes": list(notes),
    }


def _resume(arm: Arm, folder: ArmFolder) -> tuple[int, float, list[str]]:
    loaded = folder.load()
    if loaded is None:
        return 0, 0.0, []
    weights, state = loaded
    arm.model.load_state_dict(weights)
    arm.optimizer.load_state_dict(state["optimizer"])
    if arm.schedule is not None:
        arm.schedule.load_state_dict(state["schedule"])
    arm.goal.load_state_dict(state["goal"])
    restore_random_state(state["random"])
    return int(state["step"]), float(state["seconds"]), list(state["notes"])
