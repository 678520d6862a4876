"""`gradreg train`: heads over a shared base on collages, with and without a penalty on their gradients."""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gradreg.experiments import run_id
from gradreg.experiments.callbacks import sweeping_here
from gradreg.experiments.failures import Failed, JobFailed, show
from gradreg.experiments.job import run

__all__ = ["main"]

run_id.register()  # before Hydra composes: the run directory is named by it


@hydra.main(version_base="1.3", config_path="pkg://gradreg.conf", config_name="train")
def main(config: DictConfig) -> float:
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


if __name__ == "__main__":
    main()
