"""`gradreg index`: training gradients on disk, for `gradreg query`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from gradreg.experiments.attribution.prepare import prepare, settings_problems
from gradreg.experiments.attribution.program import first_rank, run_job
from gradreg.experiments.files import write_text

__all__ = ["CONFIG", "index_folder", "main"]

CONFIG = "command.yaml"
"""Beside the shards: what the index was made from, so that `gradreg query` needs to be told the folder alone."""


def index_folder(config: Mapping[str, Any]) -> Path:
    """Return where the index lies; that of a run is inside it unless said otherwise."""
    if config["path"] is not None:
        return Path(config["path"])
    return Path(config["run"]) / "index" / str(config["arm"] or "all")


def _problems(config: Mapping[str, Any]) -> list[str]:
    problems = settings_problems(config)
    if config["path"] is None and config["run"] is None:
        problems.append("path: a value is required; give path=..., the folder of the index.")
    workers = config["workers"]
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        problems.append(f"workers: {workers!r} is not allowed; allowed are the integers 1, 2, 3, ...")
    return problems


def _work(config: dict[str, Any]) -> None:
    folder, started = index_folder(config), time.perf_counter()
    prepared = prepare(config)
    index = prepared.tracin.index(
        prepared.train, folder, workers=config["workers"], shard_rows=config["shard_rows"], max_size=config["max_size"]
    )
    kept = {key: value for key, value in config.items() if key not in ("workers", "worker", "path", "shard_rows")}
    write_text(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(kept)))
    if first_rank():
        seconds = time.perf_counter() - started
        print(f"{index}\n{index.nbytes / 2**20:.1f} MiB in {folder}, {index.nbytes / len(index):.0f} bytes per example")
        print(f"{prepared.tracin.coverage.fraction:.1%} of the parameters are covered; {seconds:.1f} s")
        if config["verify"]:
            print(f"Against exact scores: {index.verify(min(config['verify'], len(index)))}")
        print(f"Ask it with: gradreg query index={folder}")


@hydra.main(version_base="1.3", config_path="pkg://gradreg.conf", config_name="index")
def main(config: DictConfig) -> float:
    """Build an index, or finish one."""
    return run_job(config, _problems, _work)


if __name__ == "__main__":
    main()
