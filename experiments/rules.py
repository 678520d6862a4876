"""Rules for the plain values of `gradreg train` and `gradreg study`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from gradreg.errors import closest
from gradreg.experiments.activations import ACTIVATIONS

__all__ = ["count_problems", "study_problems", "train_problems"]

_COUNTS = ("steps", "batch_size", "log_every", "evaluate_every", "checkpoint_every")
_SIZES = ("count", "width", "components")  # of heads and bases
_RESERVED = {"task", "loss"}  # names that the logs use themselves


def train_problems(config: Mapping[str, Any]) -> list[str]:
    """List what is wrong with the values, each with its path and what is allowed."""
    problems = [problem for key in _COUNTS for problem in count_problems(key, config[key])]
    problems += _seed("seed", config["seed"])
    threads = config["threads"]
    problems += count_problems("threads", threads) if threads is not None else []
    problems += _device(config["device"])
    if not config["arms"] and not config["upper_bound"]:
        problems.append("arms: nothing to train; select at least one, such as arms=[penalty], or keep upper_bound.")
    for key in ("base", "heads"):
        problems += _counts_of(key, config[key])
    problems += _optimizer(config["optimizer"])
    schedule = config["learning_rate_schedule"]
    if schedule is not None and not (isinstance(schedule, Mapping) and "_target_" in schedule):
        problems.append(
            f"learning_rate_schedule: {schedule!r} is not allowed; allowed are null (a constant rate) or a mapping such as "
            "{_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 100}."
        )
    arms = {f"arms.{name}": arm for name, arm in config["arms"].items()}
    if config["upper_bound"]:
        arms["upper_bound"] = config["upper_bound"]
    for path, arm in arms.items():
        problems += _arm(path, arm, config)
    for name, node in config["regularizers"].items():
        problems += _regularizer(f"regularizers.{name}", name, node)
    return problems


def study_problems(config: Mapping[str, Any]) -> list[str]:
    """List what is wrong with the values that all studies share."""
    seeds, threads = config["seeds"], config["threads"]
    problems = count_problems("threads", threads) if threads is not None else []
    if not isinstance(seeds, list) or not seeds:
        return [*problems, f"seeds: {seeds!r} is not allowed; give a list of integers, such as 'seeds=[0,1,2]'."]
    problems += [problem for position, seed in enumerate(seeds) for problem in _seed(f"seeds.{position}", seed)]
    if not problems and len(set(seeds)) < len(seeds):
        problems.append(f"seeds: {seeds!r} names a seed twice, which would make the spread look smaller than it is.")
    if not isinstance(config["study"], Mapping) or "_target_" not in config["study"]:
        problems.append(f"study: {config['study']!r} describes no study; choose one of the group, or give a _target_.")
    return problems


def _arm(path: str, arm: Any, config: Mapping[str, Any]) -> list[str]:
    if not isinstance(arm, Mapping):
        return [f"{path}: {arm!r} is not an arm; expected base, heads, regularizers, proximal and steps."]
    wanted = {"base", "heads", "proximal", "steps"} | ({"regularizers"} if path != "upper_bound" else set())
    problems = [f"{path}.{key}: missing." for key in sorted(wanted - set(arm))]
    problems += [f"{path}.{key}: unknown; allowed are {sorted(wanted)}." for key in sorted(set(arm) - wanted)]
    problems += count_problems(f"{path}.steps", arm["steps"]) if "steps" in arm else []
    problems += [p for key in ("base", "heads") if key in arm for p in _counts_of(f"{path}.{key}", arm[key])]
    regularizers = arm.get("regularizers") or {}
    if not isinstance(regularizers, Mapping):
        return [*problems, f"{path}.regularizers: {regularizers!r} is not allowed; give regularizers by name, or {{}}."]
    for name, node in regularizers.items():
        problems += _regularizer(f"{path}.regularizers.{name}", name, node)
    compared = [name for name, node in regularizers.items() if _target(node).endswith(".DiverseHeads")]
    heads = arm.get("heads")
    if compared and isinstance(heads, Mapping) and heads.get("count") == 1:
        problems.append(
            f"{path}.heads.count: 1 head, but regularizers.{compared[0]} compares heads with each other; use 2 or "
            "more, or regularizer=[]."
        )
    return problems


def _target(node: Any) -> str:
    return str(node.get("_target_", "")) if isinstance(node, Mapping) else ""


def _counts_of(path: str, node: Any) -> list[str]:
    if not isinstance(node, Mapping):
        return [f"{path}: {node!r} describes no object; expected a _target_."]
    problems = [p for key in _SIZES if node.get(key) is not None for p in count_problems(f"{path}.{key}", node[key])]
    activation = node.get("activation")
    ours = _target(node).startswith("gradreg.")
    if ours and isinstance(activation, str) and activation != "???" and activation not in ACTIVATIONS:
        problems.append(
            f"{path}.activation: {activation!r} is not allowed; allowed are {', '.join(ACTIVATIONS)}. Closest: "
            f"{closest(activation, ACTIVATIONS, 1).partition(' (')[0]}."
        )
    return problems


def _optimizer(node: Any) -> list[str]:
    if not isinstance(node, Mapping) or "_target_" not in node:
        return [
            f"optimizer: {node!r} is not allowed; expected a mapping with _target_, such as torch.optim.Adam, and lr."
        ]
    rate = node.get("lr")
    if isinstance(rate, (int, float)) and not isinstance(rate, bool) and not (math.isfinite(rate) and rate >= 0):
        return [f"optimizer.lr: {rate} is not allowed; allowed are finite numbers from 0 up."]
    return []


def _regularizer(path: str, name: str, node: Any) -> list[str]:
    if not isinstance(node, Mapping) or "_target_" not in node:
        return [f"{path}: {node!r} describes no regularizer; expected a _target_."]
    problems = [f"{path}: the name {name!r} is taken by the logs; choose another."] if name in _RESERVED else []
    return problems + _weights(f"{path}.weight", node.get("weight", 0.0))


def _weights(path: str, weight: Any) -> list[str]:
    """Judge a weight, or the numbers of a schedule of it, to any depth."""
    if isinstance(weight, Mapping):
        inner = [(key, value) for key, value in weight.items() if not str(key).startswith("_")]
        return [p for key, value in inner for p in _weights(f"{path}.{key}", value)]
    if isinstance(weight, (int, float)) and not (math.isfinite(weight) and weight >= 0):
        return [f"{path}: {weight} is not allowed; allowed are finite numbers from 0 up."]
    return []


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _seed(path: str, value: Any) -> list[str]:
    if _is_integer(value) and 0 <= value < 2**31:
        return []
    return [f"{path}: {value!r} is not allowed; allowed are integers from 0 to {2**31 - 1}."]


def count_problems(path: str, value: Any) -> list[str]:
    """Say that a value is no integer from 1; empty if it is one."""
    if value == "???" or (_is_integer(value) and value >= 1):
        return []
    return [f"{path}: {value!r} is not allowed; allowed are the integers 1, 2, 3, ..."]


def _device(name: Any) -> list[str]:
    if name == "auto":
        return []
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        return [f"device: {name!r} is not allowed; allowed are auto, cpu, cuda, cuda:1, mps."]
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return [f"device: {name!r} was asked for, but {torch.cuda.device_count()} CUDA devices are available."]
    if device.type == "mps" and not torch.backends.mps.is_available():
        return ["device: 'mps' was asked for, but is not available."]
    return [] if device.type in ("cpu", "cuda", "mps") else [f"device: {name!r} is not supported; use auto or cpu."]
