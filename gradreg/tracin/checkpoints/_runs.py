"""All checkpoints of a training, from the folder that it left."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradreg.errors import AttributionWarning, CheckpointError, closest, warn
from gradreg.tracin.checkpoints._checkpoint import Checkpoint
from gradreg.tracin.checkpoints._hugging_face import has_weights

__all__ = ["as_checkpoints", "read_checkpoints"]

_SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")
_NOT_WEIGHTS = ("resume.pt", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "training_args.bin")


def read_checkpoints(
    folder: str | Path, *, arm: str | None = None, learning_rate: float | None = None
) -> list[Checkpoint]:
    """Return the checkpoints of a training in the order of their steps, with their learning rates.

    Understood are the folder of a `gradreg train` run or of one of its arms; the output folder of the HF Trainer
    (`checkpoint-<step>/`) or one of `save_pretrained`; the folder of a Lightning logger; and any folder of files of
    `torch.save` or safetensors, sorted by the numbers in their names. Other files are ignored.

    Args:
        folder: The folder, or one file.
        arm: Which arm of a gradreg run, where there are several.
        learning_rate: For all of them, in place of what is found.

    Raises:
        CheckpointError: If there are no checkpoints, one cannot be read, or has no learning rate.

    Example:
        >>> import tempfile, torch, gradreg as gr
        >>> folder = tempfile.mkdtemp()
        >>> for step in (10, 9):
        ...     torch.save({"w": torch.zeros(2), "learning_rate": 1 / step}, f"{folder}/step-{step}.pt")
        >>> gr.read_checkpoints(folder)
        [Checkpoint('step-9.pt', learning_rate=0.111111), Checkpoint('step-10.pt', learning_rate=0.1)]
    """
    path = Path(folder)
    if path.is_file() or not path.exists():
        return [Checkpoint(path, learning_rate)]
    found = _found(path, arm)
    return [Checkpoint(item, learning_rate) for item in sorted(found, key=lambda item: _numbers(item.name))]


def as_checkpoints(given: Any) -> list[Checkpoint]:
    """Read what `TracIn(checkpoints=...)` is given: checkpoints, paths and state dicts, one or a list of them.

    Raises:
        CheckpointError: If it is none of these.
    """
    items = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    checkpoints: list[Checkpoint] = []
    for item in items:
        if isinstance(item, Checkpoint):
            checkpoints.append(item)
        elif isinstance(item, (str, Path)):
            checkpoints += read_checkpoints(item)
        elif isinstance(item, Mapping):
            checkpoints.append(Checkpoint(item))
        else:
            raise CheckpointError(
                f"checkpoints holds a {type(item).__name__}; allowed are gradreg.Checkpoint, paths of files and folders, and "
                "state dicts with a key 'learning_rate'."
            )
    if not checkpoints:
        raise CheckpointError(
            "checkpoints is empty. For the model as it is: [Checkpoint(model.state_dict(), learning_rate=...)]."
        )
    for checkpoint in checkpoints:
        if checkpoint.learning_rate == 0:
            warn(
                f"{checkpoint!r} counts nothing: its learning rate is 0 ({checkpoint.learning_rate_origin}).",
                AttributionWarning,
            )
    return checkpoints


def _found(path: Path, arm: str | None) -> list[Path]:
    if (path / "arms").is_dir():
        path = _arm(path / "arms", arm)
    elif arm is not None:
        raise CheckpointError(f"arm={arm!r}, but {path} is no run of gradreg train (it has no folder 'arms').")
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    steps = [item for item in path.glob("checkpoint-*") if item.is_dir() and has_weights(item)]
    if steps:
        return steps
    if has_weights(path):
        return [path]
    files = [
        item
        for item in path.iterdir()
        if item.suffix in _SUFFIXES and item.is_file() and item.name not in _NOT_WEIGHTS and item.name[0] != "."
    ]
    if not files:
        raise CheckpointError(
            f"{path} holds no checkpoints: neither checkpoint-<step> folders with weights nor files of {', '.join(_SUFFIXES)}; "
            f"in it lie {closest('checkpoint', (item.name for item in path.iterdir()))}."
        )
    return files


def _arm(arms: Path, arm: str | None) -> Path:
    names = sorted(item.name for item in arms.iterdir() if item.is_dir())
    if arm is None and len(names) == 1:
        return arms / names[0]
    if arm is None or arm not in names:
        found = f"arm={arm!r} is not there" if arm is not None else f"the run has {len(names)} arms"
        raise CheckpointError(
            f"{arms.parent}: {found}. Say which: read_checkpoints(folder, arm=...); {closest(arm or '', names)}."
        )
    return arms / arm


def _numbers(name: str) -> tuple[Any, ...]:
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name))
