"""Attributions on disk: one safetensors file, with everything that is no tensor as JSON in its metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_bytes
from torch import Tensor

from gradreg._files import write_durably
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
    _check_name(path)
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
    # clones, for two tensors of one storage (a view of an expanded one, say) are refused
    kept = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    data = as_bytes(kept, metadata={"gradreg": json.dumps(about, allow_nan=False)})
    write_durably(path, lambda file: file.write_bytes(data))  # save_file would make it unreadable for other users


def load(path: Path) -> dict[str, Any]:
    """Read a file as the arguments of `Attribution`; tensors lie on the CPU.

    Raises:
        GradregError: If the file is missing, half-written, of another program or of a later version.
    """
    _check_name(path)
    if not path.is_file():
        raise GradregError(f"{path} is no file; save an attribution there first.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            about = _about(path, metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as problem:
        raise GradregError(
            f"{path} is no whole safetensors file ({problem}). It was cut short or is something else."
        ) from problem
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


def _check_name(path: Path) -> None:
    if path.suffix != ".safetensors":
        raise GradregError(f"The path {str(path)!r} does not end in .safetensors; give one that does.")


def _about(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    try:
        about = json.loads(metadata["gradreg"])
        written = about["format"], int(about["version"])
    except (KeyError, TypeError, ValueError):
        written = "", 0
    if written[0] != FORMAT:
        raise GradregError(f"{path} is a safetensors file, but not one that Attribution.save wrote.")
    if written[1] > VERSION:
        raise GradregError(
            f"{path} has version {written[1]}; this gradreg reads versions up to {VERSION}. Update gradreg."
        )
    found: dict[str, Any] = about
    return found
