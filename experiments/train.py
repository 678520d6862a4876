"""`gradreg train`: heads over a shared base on collages, with and without a penalty on their gradients."""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gradreg.experiments import run_id
from gradreg.experiments.job import run

__all__ = ["main"]

run_id.register()  # before Hydra composes: the run directory is named by it


@hydra.main(version_base="1.3", config_path="pkg://gradreg.conf", config_name="train")
def main(config: DictConfig) -> float:
    """Run one job in the directory that Hydra chose."""
    runtime = HydraConfig.get()
    return run(config, Path(runtime.runtime.output_dir), list(runtime.overrides.task))


if __name__ == "__main__":
    main()
