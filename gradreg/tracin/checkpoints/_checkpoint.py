"""Checkpoint: weights, the learning rate they were trained with, and perhaps the optimizer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradreg.batch import map_tensors
from gradreg.errors import CheckpointError, closest
from gradreg.tracin.checkpoints._hugging_face import trainer_source
from gradreg.tracin.checkpoints._safetensors import safetensors_source
from gradreg.tracin.checkpoints._source import Source, as_rate, rate_of_groups
from gradreg.tracin.checkpoints._torch_files import is_optimizer_state, load_torch, mapping_source, torch_source

__all__ = ["Checkpoint", "LoadedCheckpoint"]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The weights of a checkpoint, and a fingerprint of them."""

    weights: Mapping[str, Tensor]
    fingerprint: str


class Checkpoint:
    """Weights of one moment of a training, and the learning rate of that moment.

    Args:
        source: A state dict (it is copied, so that training on changes nothing), also with a key `"learning_rate"`, or a
            dictionary around one; or a path: a file of `torch.save`, a safetensors file, a Lightning checkpoint, a
            `checkpoint-<step>` folder of the HF Trainer. Files are read without running what may be pickled in them.
        learning_rate: Per optimizer step. None: what stands in the source or the optimizer, see `learning_rate_origin`.
        optimizer: State dict of the optimizer (or a path to it), for `TracIn(update="optimizer")`. None: what stands beside
            the weights.
        optimizer_parameters: Names of the parameters in the order in which the optimizer was given them, group after group,
            where it cannot be told.
        name: For messages and progress; by default the file's.

    Raises:
        CheckpointError: If there is no such file, it holds no weights, or no learning rate is found or given.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Linear(2, 1)
        >>> gr.Checkpoint(net.state_dict(), learning_rate=0.1)
        Checkpoint('state dict', learning_rate=0.1)
        >>> gr.Checkpoint({**net.state_dict(), "learning_rate": 0.05}).learning_rate
        0.05
    """

    def __init__(
        self,
        source: Mapping[str, Any] | str | Path,
        learning_rate: float | Tensor | None = None,
        *,
        optimizer: Mapping[str, Any] | str | Path | None = None,
        optimizer_parameters: Sequence[str] | None = None,
        name: str | None = None,
    ) -> None:
        self._source = _look_at(source)
        self.name = name or (Path(self._source.place).name if isinstance(source, (str, Path)) else self._source.place)
        self.path = Path(source) if isinstance(source, (str, Path)) else None
        self.optimizer_parameters = None if optimizer_parameters is None else tuple(optimizer_parameters)
        self._optimizer = _copied(optimizer)
        self.learning_rate, self.learning_rate_origin = self._rate(learning_rate)

    def __repr__(self) -> str:
        return f"Checkpoint({self.name!r}, learning_rate={self.learning_rate:g})"

    def load(self) -> LoadedCheckpoint:
        """Read the weights.

        Raises:
            CheckpointError: If a weight is NaN or infinite.
        """
        weights = self._source.weights()
        for name, value in weights.items():
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise CheckpointError(f"{self._source.place}: {name!r} holds NaN or infinite numbers.")
        return LoadedCheckpoint(weights, _fingerprint(weights))

    def optimizer_state(self) -> Mapping[str, Any]:
        """Return the state dict of the optimizer.

        Raises:
            CheckpointError: If there is none.
        """
        given = self._optimizer
        if isinstance(given, (str, Path)):
            given = load_torch(_existing(Path(given)))
        if given is None:
            if self._source.optimizer is None:
                raise CheckpointError(
                    f"{self._source.place} comes without an optimizer. Give its state: Checkpoint(..., "
                    "optimizer=optimizer.state_dict())."
                )
            given = self._source.optimizer()
        if not is_optimizer_state(given):
            raise CheckpointError(
                f"The optimizer of {self._source.place} is no state dict of torch.optim (keys 'state' and 'param_groups')."
            )
        state: Mapping[str, Any] = given
        return state

    def _rate(self, given: float | Tensor | None) -> tuple[float, str]:
        rate, origin = self._source.learning_rate, self._source.rate_origin
        if given is not None:
            rate, origin = as_rate(given), "given"
        elif rate is None and self._optimizer is not None:
            rate, origin = rate_of_groups(self.optimizer_state()["param_groups"], "the optimizer's parameter groups")
        if given is not None and rate is None:
            raise CheckpointError(f"learning_rate={given!r} is no number.")
        if rate is None:
            raise CheckpointError(
                f"No learning rate is known for {self._source.place} (looked at {origin}). It weighs the "
                "checkpoint: give the one of its training, Checkpoint(source, learning_rate=0.1)."
            )
        if not math.isfinite(rate) or rate < 0:
            raise CheckpointError(f"learning_rate={rate!r} of {self._source.place}; allowed are numbers from 0.")
        return rate, origin


def _look_at(source: Any) -> Source:
    if isinstance(source, Mapping):
        return mapping_source(_copied(source), "state dict")
    if not isinstance(source, (str, Path)):
        hint = " Give model.state_dict()." if isinstance(source, torch.nn.Module) else ""
        raise CheckpointError(f"A checkpoint is a state dict or a path, found a {type(source).__name__}.{hint}")
    path = _existing(Path(source))
    if path.is_dir():
        return trainer_source(path)
    return safetensors_source(path) if path.suffix == ".safetensors" else torch_source(path)


def _copied(value: Any) -> Any:
    """Return a state with tensors of its own: training on changes those of the model and the optimizer in place."""
    return map_tensors(lambda tensor: tensor.detach().clone(), value)


def _existing(path: Path) -> Path:
    if not path.exists():
        beside = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise CheckpointError(f"There is no {path}; beside it lie {closest(path.name, beside)}.")
    return path


def _fingerprint(weights: Mapping[str, Tensor]) -> str:
    digest: Any = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        value = weights[name]
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return str(digest.hexdigest())
