"""From a configuration to a TracIn and its training examples: from a `gradreg train` run, or a user's own objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

import gradreg as gr
from gradreg.errors import GradregError, closest
from gradreg.experiments._instantiate import build
from gradreg.experiments.arms import make_arm, plan_arms
from gradreg.experiments.data import Data
from gradreg.experiments.environment import choose_device

__all__ = ["Prepared", "prepare", "settings_problems"]


@dataclass
class Prepared:
    """What `gradreg index` and `gradreg query` work on.

    Args:
        tracin: Model, checkpoints and settings.
        train: Training examples, as TracIn reads them.
        tests: Test sets by name.
        collate: From rows to a batch, or None.
    """

    tracin: gr.TracIn
    train: Any
    tests: Mapping[str, Any]
    collate: Callable[[list[Any]], Any] | None


def settings_problems(config: Mapping[str, Any]) -> list[str]:
    """List what is wrong with the sources, each with its path and what is allowed."""
    own = [key for key in ("model", "train", "checkpoints") if config[key] is not None]
    problems = []
    if config["run"] is not None:
        if not (Path(config["run"]) / "config.yaml").is_file():
            problems.append(f"run: {config['run']} is no folder of a `gradreg train` run (it has no config.yaml).")
        problems += [
            f"{key}: a run brings its own; give run=... or model, train and checkpoints, not both." for key in own
        ]
    elif len(own) < 3:
        missing = [key for key in ("model", "train", "checkpoints") if config[key] is None]
        problems += [f"{key}: a value is required, unless run=... names a `gradreg train` run." for key in missing]
    if config["run"] is None and config["arm"] is not None:
        problems.append("arm: only a run has arms; give run=... too.")
    return problems


def prepare(config: Mapping[str, Any]) -> Prepared:
    """Build the objects.

    Args:
        config: Plain values, checked.

    Raises:
        GradregError: If the run has no such arm, or what was built does not fit.
    """
    device = choose_device(config["device"])
    model, train, tests, checkpoints, task = (_of_run if config["run"] is not None else _of_user)(config, device)
    collate = build(config["collate"]) if config["collate"] is not None else None
    tracin = gr.TracIn(
        model,
        of=build(config["of"]) if config["of"] is not None else gr.loss(task),
        test_of=build(config["test_of"]) if config.get("test_of") else None,
        checkpoints=checkpoints,
        params=config["params"],
        normalize=config["normalize"],
        update=config["update"],
        projection=build(config["projection"]) if config["projection"] is not None else None,
        memory=config["memory"],
        collate=collate,
        show_progress=config["progress"],
    )
    return Prepared(tracin, train, tests, collate)


def _of_run(config: Mapping[str, Any], device: torch.device) -> tuple[Any, Any, Mapping[str, Any], Any, Any]:
    folder = Path(config["run"])
    trained: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"), resolve=True)
    data: Data = build(trained["data"]).load(upper_bounds=bool(trained["upper_bound"])).to(device)
    plan = plan_arms(trained, tuple(part for part in data.parts if part in data.upper_bounds))
    name = config["arm"]
    if name is None and len(plan) == 1:
        name = next(iter(plan))
    if name not in plan:
        found = "the run has several arms" if name is None else f"arm: the run has no {name!r}"
        raise GradregError(f"{found}; give arm=... Closest: {closest(str(name), plan)}.")
    arm = make_arm(name, plan[name], trained, data, device)
    return arm.model, arm.train, data.test, gr.read_checkpoints(folder, arm=name), build(trained["task"])


def _of_user(config: Mapping[str, Any], device: torch.device) -> tuple[Any, Any, Mapping[str, Any], Any, Any]:
    model = build(config["model"])
    if not isinstance(model, torch.nn.Module):
        raise GradregError(
            f"model: {config['model']['_target_']} gives a {type(model).__name__}; expected a torch.nn.Module."
        )
    test = build(config["test"]) if isinstance(config.get("test"), Mapping) else None
    tests = {} if test is None else {"test": test}
    checkpoints, task = _checkpoints(config["checkpoints"]), torch.nn.CrossEntropyLoss()
    return model.to(device), build(config["train"]), tests, checkpoints, task


def _checkpoints(given: Any) -> list[gr.Checkpoint]:
    items = given if isinstance(given, list) else [given]
    found: list[gr.Checkpoint] = []
    for item in items:
        if isinstance(item, str):
            found += gr.read_checkpoints(item)
        else:
            found += gr.read_checkpoints(item["path"], learning_rate=item.get("learning_rate"))
    return found
