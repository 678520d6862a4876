"""`gradreg train`: heads over a shared base on collages, with and without a penalty on their gradients."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from gradreg.experiments import run_id
from gradreg.experiments.job import run
from gradreg.experiments.lifecycle import under_hydra

__all__ = ["main"]

run_id.register()  # before Hydra composes: the run directory is named by it


@hydra.main(version_base="1.3", config_path="pkg://gradreg.conf", config_name="train")
def main(config: DictConfig) -> float:
    """Run one job."""
    return under_hydra(run, config)


if __name__ == "__main__":
    main()
