"""Safetensors files, alone, as files of a gradreg run, and cut into shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from gradreg.errors import CheckpointError
from gradreg.tracin.checkpoints._source import Source, as_rate
from gradreg.tracin.checkpoints._torch_files import load_torch

__all__ = ["load_safetensors", "load_shards", "safetensors_source"]


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        CheckpointError: If it is broken.
    """
    try:
        return load_file(path)
    except SafetensorError as problem:
        raise CheckpointError(f"{path} is no whole safetensors file: {problem}") from problem


def load_shards(index: Path, load: Callable[[Path], Mapping[str, Any]]) -> dict[str, Tensor]:
    """Read weights that lie in several files, from the index `{"weight_map": {name: file}}` beside them.

    Raises:
        CheckpointError: If a file is missing, lacks a weight or lies elsewhere.
    """
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(f"{index} is no index of shards: {problem!r}") from problem
    weights: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        path = index.parent / file
        if Path(file).name != file or not path.is_file():
            raise CheckpointError(f"{index} names the shard {file!r}, which is not in its folder.")
        shard = load(path)
        wanted = [name for name, place in places.items() if place == file]
        lacking = [name for name in wanted if name not in shard]
        if lacking:
            raise CheckpointError(f"{path} lacks {lacking[0]!r}, which {index.name} says is in it.")
        weights.update({name: shard[name] for name in wanted})
    return weights


def safetensors_source(path: Path) -> Source:
    """Look at a safetensors file; `gradreg train` writes the learning rate into its metadata.

    Raises:
        CheckpointError: If it is broken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as problem:
        raise CheckpointError(f"{path} is no whole safetensors file: {problem}") from problem
    rate = None
    if "learning_rate" in metadata:
        try:
            rate = as_rate(float(metadata["learning_rate"]))
        except ValueError as problem:
            raise CheckpointError(f"{path}: learning_rate {metadata['learning_rate']!r} is no number.") from problem
    state = path.parent.parent / "resume.pt"
    in_run = path.parent.name == "checkpoints" and "arm" in metadata and state.is_file()
    optimizer = (lambda: _optimizer_of_run(state, path, metadata)) if in_run else None
    return Source(str(path), lambda: load_safetensors(path), rate, "metadata 'learning_rate'", optimizer)


def _optimizer_of_run(state: Path, path: Path, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    content = load_torch(state)
    if str(content.get("step")) != metadata.get("step"):
        raise CheckpointError(
            f"{state} holds the optimizer after step {content.get('step')}, and {path.name} is of step {metadata.get('step')}: "
            "a run keeps the optimizer of its last checkpoint only."
        )
    optimizer: Mapping[str, Any] = content["optimizer"]
    return optimizer
