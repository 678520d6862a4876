"""Arms: what is trained and compared in one job, all on the same data and in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import gradreg as gr
from gradreg.experiments._instantiate import build
from gradreg.experiments.data import Data
from gradreg.experiments.reproducible import seed_everything

__all__ = ["UPPER_BOUND", "Arm", "make_arm", "plan_arms"]

UPPER_BOUND = "upper_bound_"  # prefix of the arms trained for one part alone


@dataclass
class Arm:
    """Everything that one training needs.

    Args:
        name: Name in files and tables.
        model: Heads over a base.
        goal: Task and regularizers.
        optimizer: Over all parameters of the model.
        schedule: Of the learning rate, one step per optimizer step; or None.
        proximal: Called with model and learning rate after every optimizer step; or None.
        train: Training set.
        steps: Optimizer steps.
    """

    name: str
    model: gr.SharedBase
    goal: gr.Objective
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    proximal: Callable[[nn.Module, float], None] | None
    train: gr.Batch
    steps: int


def plan_arms(config: Mapping[str, Any], parts: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """List the arms of a job by name: the configured ones, then one upper bound per part."""
    plan = {name: {**node, "part": None} for name, node in config["arms"].items()}
    for part in parts if config["upper_bound"] else ():
        plan[UPPER_BOUND + part] = {**config["upper_bound"], "regularizers": {}, "part": part}
    return plan


def make_arm(name: str, node: Mapping[str, Any], config: Mapping[str, Any], data: Data, device: torch.device) -> Arm:
    """Build an arm; every arm starts from the same seed, so equal models start with equal weights.

    Raises:
        GradregError: If the base does not give features `[n, d]`, or nothing can be trained.
    """
    seed_everything(config["seed"])
    base = build(node["base"], data=data).to(device)
    with torch.no_grad():
        features = base(data.train.inputs[:2])
    if not isinstance(features, torch.Tensor) or features.dim() != 2:
        found = list(features.shape) if isinstance(features, torch.Tensor) else type(features).__name__
        raise gr.errors.GradregError(f"arms.{name}.base gives {found} for two examples; expected features [2, d].")
    heads = build(node["heads"], features=features.shape[1], classes=data.classes)
    model = gr.SharedBase(base, heads).to(device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise gr.errors.GradregError(f"arms.{name}: no parameter of base and heads requires grad; nothing to train.")
    regularizers = {key: build(item) for key, item in node["regularizers"].items()}
    optimizer = build(config["optimizer"], params=parameters)
    schedule = config["learning_rate_schedule"]
    return Arm(
        name=name,
        model=model,
        goal=gr.Objective(build(config["task"]), **regularizers).to(device),
        optimizer=optimizer,
        schedule=build(schedule, optimizer=optimizer) if schedule else None,
        proximal=build(node["proximal"]) if node["proximal"] else None,
        train=data.train if node["part"] is None else data.upper_bounds[node["part"]],
        steps=node["steps"],
    )
