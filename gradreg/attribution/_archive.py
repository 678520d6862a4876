"""Results on disk: one safetensors file, with everything that is no tensor as JSON in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_bytes
from torch import Tensor

from gradreg._files import write_durably
from gradreg.errors import GradregError

__all__ = ["read", "write"]


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a file under a temporary name, then rename it.

    Args:
        path: Ends in `.safetensors`.
        tensors: By name.
        about: What goes to JSON, with `"format"` and `"version"`.

    Raises:
        GradregError: If the name does not end in `.safetensors`.
    """
    _check_name(path)
    # clones, for two tensors of one storage (a view of an expanded one, say) are refused
    kept = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    data = as_bytes(kept, metadata={"gradreg": json.dumps(about, allow_nan=False)})
    write_durably(path, lambda file: file.write_bytes(data))  # save_file would make it unreadable for other users


def read(path: Path, form: str, version: int, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, on the CPU, and what else was written.

    Args:
        path: Of the file.
        form: The format that it must have.
        version: The latest that is known.
        what: How messages call the result.

    Raises:
        GradregError: If the file is missing, half-written, of another program or of a later version.
    """
    _check_name(path)
    if not path.is_file():
        raise GradregError(f"{path} is no file; save {what} there first.")
    try:
        with safe_open(path, framework="pt") as file:
            about = _about(path, file.metadata() or {}, form, version, what)
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118  # no mapping
    except SafetensorError as problem:
        raise GradregError(
            f"{path} is no whole safetensors file ({problem}). It was cut short or is something else."
        ) from problem


def _check_name(path: Path) -> None:
    if path.suffix != ".safetensors":
        raise GradregError(f"The path {str(path)!r} does not end in .safetensors; give one that does.")


def _about(path: Path, metadata: Mapping[str, str], form: str, version: int, what: str) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads(metadata["gradreg"])
        written = about["format"], int(about["version"])
    except (KeyError, TypeError, ValueError):
        about, written = {}, ("", 0)
    if written[0] != form:
        raise GradregError(f"{path} is a safetensors file, but not one that holds {what}.")
    if written[1] > version:
        raise GradregError(
            f"{path} has version {written[1]}; this gradreg reads versions up to {version}. Update gradreg."
        )
    return about
