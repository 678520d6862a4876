"""The name of a run: a hash of its composed configuration, so equal runs share a folder wherever they start."""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import Any

from omegaconf import DictConfig, OmegaConf

__all__ = ["IGNORED", "content_hash", "register", "seedless_hash"]

IGNORED = ("hydra", "device", "threads", "progress", "plots", "force", "runs")  # say how to run, not what
"""Top-level keys that do not change what is computed."""


def content_hash(config: DictConfig) -> str:
    """Hash the resolved configuration without the ignored keys."""
    content = OmegaConf.to_container(_without_hydra(config), resolve=True)
    text = json.dumps({key: value for key, value in content.items() if key not in IGNORED}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def seedless_hash(config: DictConfig) -> str:
    """Hash of all but the seed and what is derived from it: equal for the runs of one table over seeds."""
    copy = _without_hydra(config)
    copy.seed = None
    return content_hash(copy)


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def _run_id(*, _root_: DictConfig) -> Any:
    return content_hash(_root_)


def register() -> None:
    """Make `${run_id:}` known to OmegaConf."""
    current = OmegaConf.register_resolver
    if "replace" not in inspect.signature(current).parameters:  # before OmegaConf 2.4 that name is the oldest interface
        current = OmegaConf.register_new_resolver
    current("run_id", _run_id, replace=True)
