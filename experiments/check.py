"""`gradreg check`: who hears of the penalties of an experiment, who does not, and why."""

from __future__ import annotations

from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

import gradreg as gr
from gradreg.experiments import run_id
from gradreg.experiments.arms import make_arm, plan_arms
from gradreg.experiments.environment import choose_device
from gradreg.experiments.failures import JobFailed, show
from gradreg.experiments.reproducible import deterministic
from gradreg.experiments.rules import count_problems, train_problems
from gradreg.experiments.validate import ConfigError, check

__all__ = ["main", "reports"]

run_id.register()  # before Hydra composes: the configuration of gradreg train names it


def reports(config: DictConfig) -> dict[str, gr.DoubleBackwardReport]:
    """Check every penalty of every arm on a few training examples.

    Args:
        config: The composed configuration.

    Returns:
        From `arm / penalty` to its report.

    Raises:
        ConfigError: If the configuration is wrong, or no selected arm has a penalty.
    """
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]  # a mapping, as the file is one
    source = check(plain, _problems)["data"]
    device = choose_device(plain["device"])
    found: dict[str, gr.DoubleBackwardReport] = {}
    with deterministic(plain["threads"]):
        data = source.load(upper_bounds=False).to(device)
        generator = torch.Generator().manual_seed(plain["seed"])
        drawn = torch.randperm(len(data.train), generator=generator)[: plain["examples"]].to(device)
        for name, node in plan_arms({**plain, "upper_bound": None}, ()).items():
            if not node["regularizers"]:
                continue
            arm = make_arm(name, node, plain, data, device)
            for key, regularizer in arm.goal.regularizers.items():
                found[f"{name} / {key}"] = gr.check_double_backward(arm.model, arm.train[drawn], regularizer)
    return found


def _problems(config: Any) -> list[str]:
    problems = [*train_problems(config), *count_problems("examples", config["examples"])]
    with_penalty = any(isinstance(arm, dict) and arm.get("regularizers") for arm in config["arms"].values())
    if not with_penalty:
        problems.append("arms: none of the selected arms has a penalty, so there is nothing to check.")
    return problems


@hydra.main(version_base="1.3", config_path="pkg://gradreg.conf", config_name="check")
def main(config: DictConfig) -> None:
    """Print the reports; end with status 1 if one is blocked."""
    try:
        found = reports(config)
    except Exception as error:
        if isinstance(error, ConfigError):
            raise  # Hydra shows it without a traceback
        show(error)
        raise JobFailed(1) from error
    for name, report in found.items():
        print(f"{name}\n{report}\n")
    blocked = [name for name, report in found.items() if not report.ok]
    print(f"{len(found)} checked, {len(blocked)} blocked" + (f": {', '.join(blocked)}" if blocked else "") + ".")
    if blocked:
        raise JobFailed(1)


if __name__ == "__main__":
    main()
