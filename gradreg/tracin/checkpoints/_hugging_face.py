"""The folders that the Trainer of HF transformers writes: `checkpoint-<step>/`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gradreg.errors import CheckpointError
from gradreg.tracin.checkpoints._safetensors import load_safetensors, load_shards
from gradreg.tracin.checkpoints._source import Source, as_rate, rate_of_groups
from gradreg.tracin.checkpoints._torch_files import load_torch, mapping_source

__all__ = ["has_weights", "trainer_source"]

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FILES = ("model.safetensors", "pytorch_model.bin")


def has_weights(folder: Path) -> bool:
    """Whether a folder holds the weights of a model, by the names that HF gives them."""
    return any((folder / name).is_file() for name in (*_INDEXES, *_FILES))


def trainer_source(folder: Path) -> Source:
    """Look at one `checkpoint-<step>` folder, or at a folder of `save_pretrained`.

    The learning rate is, in this order: the one that `trainer_state.json` logged at this very step; that of the saved
    optimizer or scheduler (of the step to come); the last one that was logged before.

    Raises:
        CheckpointError: If it holds no weights, or those of an adapter only.
    """
    if not has_weights(folder):
        if any(folder.glob("adapter_model.*")):
            raise CheckpointError(
                f"{folder} holds an adapter without the model. Load both with PEFT, and give the state dict of the whole: "
                "Checkpoint(model.state_dict(), learning_rate=...)."
            )
        raise CheckpointError(
            f"{folder} holds no weights; looked for {', '.join((*_FILES, *_INDEXES))}. The "
            "checkpoints in a folder are listed by read_checkpoints(folder)."
        )
    rate, origin = _rate(folder)
    file = folder / "optimizer.pt"
    optimizer = (lambda: load_torch(file)) if file.is_file() else None
    return Source(str(folder), lambda: _weights(folder), rate, origin, optimizer)


def _weights(folder: Path) -> Mapping[str, Tensor]:
    for name in _INDEXES:
        if (folder / name).is_file():
            safe = "safetensors" in name
            return load_shards(folder / name, load_safetensors if safe else load_torch)
    if (folder / _FILES[0]).is_file():
        return load_safetensors(folder / _FILES[0])
    path = folder / _FILES[1]
    return mapping_source(load_torch(path), str(path)).weights()


def _rate(folder: Path) -> tuple[float | None, str]:
    log, step = _log(folder)
    if step is not None and step in log:
        return log[step], f"trainer_state.json, logged at step {step}"
    for name in ("optimizer.pt", "scheduler.pt"):
        if (folder / name).is_file():
            content = load_torch(folder / name)
            groups = content.get("param_groups") or [{"lr": value} for value in content.get("_last_lr", [])]
            rate, origin = rate_of_groups(groups, name)
            if rate is not None or origin != name:
                return rate, origin
    earlier = [known for known in log if step is None or known <= step]
    if earlier:
        return log[max(earlier)], f"trainer_state.json, logged at step {max(earlier)}"
    return None, "the log of trainer_state.json, optimizer.pt, scheduler.pt"


def _log(folder: Path) -> tuple[dict[int, float], int | None]:
    """Return learning rates by step, and the step of the checkpoint."""
    number = folder.name.removeprefix("checkpoint-")
    step = int(number) if number.isdigit() else None
    for path in (folder / "trainer_state.json", folder.parent / "trainer_state.json"):
        if not path.is_file():
            continue
        try:
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            rates = {
                int(row["step"]): rate
                for row in state["log_history"]
                if "step" in row and (rate := as_rate(row.get("learning_rate"))) is not None
            }
        except (ValueError, KeyError, TypeError) as problem:
            raise CheckpointError(f"{path} is no state of a Trainer: {problem!r}") from problem
        if path.parent == folder and step is None:
            step = state.get("global_step")
        return rates, step
    return {}, step
