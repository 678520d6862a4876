"""Attributions on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from gradreg.attribution._archive import read, write
from gradreg.attribution._fields import Fields
from gradreg.errors import GradregError

__all__ = ["load", "save"]

FORMAT = "gradreg.attribution"
VERSION = 1
_PER_KEY = ("by_key", "ids", "valid")
_PER_TARGET = ("change", "delta", "error")


def save(a: Fields, path: Path) -> None:
    """Write the file under a temporary name, then rename it.

    Raises:
        GradregError: If the name does not end in `.safetensors`.
    """
    keys = list(a.by_key)
    tensors: dict[str, Tensor] = {}
    for part in _PER_KEY:  # keys are any text, names in the file are numbers
        tensors |= {f"{part}/{keys.index(key)}": value for key, value in getattr(a, part).items()}
    tensors |= {part: getattr(a, part) for part in _PER_TARGET if getattr(a, part) is not None}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "keys": keys,
        "method": a.method,
        "per": a.per,
        "target_axes": list(a.target_axes),
        "target_labels": {axis: list(names) for axis, names in a.target_labels.items()},
        "segments": dict(a.segments),
        "labels": dict(a.labels),
        "provenance": dict(a.provenance),
    }
    write(path, tensors, about)


def load(path: Path) -> dict[str, Any]:
    """Read a file as the arguments of `Attribution`; tensors lie on the CPU.

    Raises:
        GradregError: If the file is missing, half-written, of another program or of a later version.
    """
    tensors, about = read(path, FORMAT, VERSION, "an attribution")
    try:
        keys = about["keys"]
        arguments: dict[str, Any] = {part: tensors.pop(part, None) for part in _PER_TARGET}
        for part in _PER_KEY:
            arguments[part] = {
                key: tensors.pop(name) for n, key in enumerate(keys) if (name := f"{part}/{n}") in tensors
            }
        arguments |= {name: about[name] for name in ("method", "per", "segments", "labels", "provenance")}
        return arguments | {"target_axes": tuple(about["target_axes"]), "target_labels": about["target_labels"]}
    except (KeyError, TypeError) as problem:
        raise GradregError(
            f"{path} says it is an attribution, but its description lacks or garbles {problem}."
        ) from problem
