"""Files of `torch.save`: plain state dicts, dictionaries around them, Lightning checkpoints. Nothing in them is run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradreg.errors import CheckpointError, closest
from gradreg.tracin.checkpoints._source import Source, as_rate, rate_of_groups

__all__ = ["is_optimizer_state", "load_torch", "mapping_source", "torch_source"]

_WEIGHTS = ("state_dict", "model_state_dict", "model_state", "model", "net", "weights")
_OPTIMIZERS = ("optimizer_states", "optimizer_state_dict", "optimizer_state", "optimizer", "optim")


def load_torch(path: Path) -> Any:
    """Read a file of `torch.save` without running what may be pickled in it.

    Raises:
        CheckpointError: If it is no such file, or holds more than tensors and plain containers.
    """
    try:
        return _load(path)
    except pickle.UnpicklingError as problem:
        reason = str(problem).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read safely (weights_only=True): {reason} Save the state dict (torch.save(model.state_dict(), "
            "path)), or, if you trust the file, allow its classes with torch.serialization.add_safe_globals([...])."
        ) from problem
    except (RuntimeError, EOFError, ValueError, KeyError) as problem:
        raise CheckpointError(f"{path} is no file of torch.save: {problem}") from problem


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)  # files of before 2020 have no map


def torch_source(path: Path) -> Source:
    """Look at a file of `torch.save`."""
    source = mapping_source(load_torch(path), str(path))
    optimizer = None
    if source.optimizer is not None:
        optimizer = lambda: _optimizer(load_torch(path), str(path))  # noqa: E731  # beside the None above
    # read again when they are wanted: a mapped file holds no memory meanwhile
    return Source(
        source.place,
        lambda: _weights(load_torch(path), str(path)),
        source.learning_rate,
        source.rate_origin,
        optimizer,
    )


def mapping_source(content: Any, place: str) -> Source:
    """Look at a state dict, or at a dictionary with one in it.

    Raises:
        CheckpointError: If there are no weights in it.
    """
    weights = _weights(content, place)
    rate, origin = as_rate(content.get("learning_rate")), "key 'learning_rate'"
    if rate is None and not isinstance(content.get("lr"), Tensor):  # a tensor of that name may be a parameter
        rate, origin = as_rate(content.get("lr")), "key 'lr'"
    optimizer = next((content[key] for key in _OPTIMIZERS if _groups(content.get(key))), None)
    if rate is None:
        rate, origin = rate_of_groups(_groups(optimizer), "the optimizer's parameter groups")
        origin = origin if rate is not None else f"keys 'learning_rate' and 'lr', and {origin}"
    read = None if optimizer is None else lambda: _optimizer(content, place)
    return Source(place, lambda: weights, rate, origin, read)


def is_optimizer_state(content: Any) -> bool:
    """Whether something is the state dict of an optimizer."""
    return isinstance(content, Mapping) and {"state", "param_groups"} <= set(content)


def _groups(optimizer: Any) -> list[Mapping[str, Any]]:
    states = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return [group for state in states if is_optimizer_state(state) for group in state["param_groups"]]


def _optimizer(content: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    found = next(content[key] for key in _OPTIMIZERS if _groups(content.get(key)))
    if isinstance(found, (list, tuple)):
        if len(found) != 1:
            raise CheckpointError(
                f"{place} holds {len(found)} optimizers. Say which one: Checkpoint(path, optimizer=<its state dict>)."
            )
        found = found[0]
    state: Mapping[str, Any] = found
    return state


def _weights(content: Any, place: str) -> Mapping[str, Tensor]:
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{place} holds a {type(content).__name__}; needed is a state dict, or a dictionary with one under "
            f"{', '.join(map(repr, _WEIGHTS[:2]))}."
        )
    if is_optimizer_state(content):
        raise CheckpointError(f"{place} is the state of an optimizer, not of a model.")
    for key in _WEIGHTS:
        inner = content.get(key)
        if isinstance(inner, Mapping) and any(isinstance(value, Tensor) for value in inner.values()):
            content = inner
            break
    tensors = {
        str(name): value
        for name, value in content.items()
        if name != "learning_rate" and (isinstance(value, Tensor) or str(name).endswith("_extra_state"))
    }
    if not tensors:
        raise CheckpointError(f"{place} holds no weights; its keys are {closest('state_dict', content)}.")
    return tensors
