"""What the Hydra programs of attribution share: plain configuration, and errors shown without Hydra's frames."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gradreg.experiments.callbacks import sweeping_here
from gradreg.experiments.failures import Failed, JobFailed, show
from gradreg.experiments.validate import check

__all__ = ["first_rank", "run_job"]


def run_job(
    config: DictConfig, rules: Callable[[Mapping[str, Any]], list[str]], work: Callable[[dict[str, Any]], None]
) -> float:
    """Check the configuration, then work on it.

    Args:
        config: The composed configuration.
        rules: Gives the problems with plain values.
        work: Called with the resolved, plain configuration.

    Raises:
        JobFailed: If the work failed, after its error was shown.
    """
    runtime = HydraConfig.get()
    multirun = runtime.mode is not None and runtime.mode.name == "MULTIRUN"
    try:
        plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]  # a mapping
        check(plain, rules)
        work(plain)
    except Exception as error:
        if multirun and not sweeping_here():
            raise
        show(error)
        if multirun:
            return Failed(error)
        raise JobFailed(1) from error
    return 0.0


def first_rank() -> bool:
    """Tell whether this process is the one that prints, among those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"
