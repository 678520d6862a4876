"""Tiny jobs for the tests of the experiments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from gradreg.experiments.job import run
from gradreg.experiments.run_directory import RunDirectory
from gradreg.experiments.run_id import content_hash, register


def _compose_train(*overrides: str, experiment: str | None = "smoke") -> DictConfig:
    """Compose the configuration of a job of seconds."""
    register()
    with initialize_config_module("gradreg.conf", version_base="1.3"):
        chosen = [f"experiment={experiment}"] if experiment else []
        return compose("train", overrides=[*chosen, "progress=false", "plots=false", *overrides])


def _run_train(root: Path, *overrides: str) -> RunDirectory:
    """Run a job in this process, in the directory that its configuration has under `root`."""
    config = _compose_train(*overrides)
    folder = root / content_hash(config)
    run(config, folder, overrides)
    return RunDirectory(folder)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run of all arms; tests only read it."""
    return _run_train(tmp_path_factory.mktemp("finished"), "plots=true")


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., RunDirectory]:
    """Run jobs under this test's own folder."""
    return lambda *overrides: _run_train(tmp_path, *overrides)


@pytest.fixture(scope="session")
def compose_train() -> Callable[..., DictConfig]:
    """Compose the configuration of a job of seconds."""
    return _compose_train


@pytest.fixture(scope="session")
def run_train() -> Callable[..., RunDirectory]:
    """Run a job in this process, in the directory that its configuration has under a root."""
    return _run_train


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    """Arrays as data=tensors reads them: two parts, each half of the features."""
    random = np.random.default_rng(0)

    def sample(only: int | None, count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % 2
        shown = np.stack([labels if only in (None, part) else random.integers(0, 2, count) for part in (0, 1)], 1)
        inputs = np.repeat(2.0 * shown - 1, 3, axis=1) + 0.3 * random.standard_normal((count, 6))
        return inputs.astype(np.float32), labels

    found = {}
    for name, only in {"train": None, "test_id": None, "test_left": 0, "test_right": 1}.items():
        found[f"{name}_inputs"], found[f"{name}_targets"] = sample(only, 48)
    return found
