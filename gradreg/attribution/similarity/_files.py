"""Reports on disk: one safetensors file, with everything that is no tensor as JSON in its metadata."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gradreg.attribution.similarity._calibration import Calibration
from gradreg.attribution.similarity._findings import Findings
from gradreg.attribution.similarity._plain import divergence_from
from gradreg.attribution.similarity._rows import Cell, TokenRow
from gradreg.errors import GradregError

FORMAT = "gradreg.similarity"
VERSION = 1
_PAIRS = ("with_a", "with_b", "among")


def save(report: Findings, path: Path) -> None:
    _check_name(path)
    tensors: dict[str, Tensor] = {f"gram/{i}": cell.gram.contiguous() for i, cell in enumerate(report.cells)}
    calibration = report.calibration
    keys = list(calibration.with_a) if calibration is not None else []
    if calibration is not None:
        for part in _PAIRS:
            tensors |= {f"{part}/{i}": getattr(calibration, part)[key].contiguous() for i, key in enumerate(keys)}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "tokens_a": [asdict(token) for token in report.tokens_a],
        "tokens_b": [asdict(token) for token in report.tokens_b],
        "cells": [[cell.group, cell.kind, list(cell.parameters), cell.numel] for cell in report.cells],
        "divergence": None if report.divergence is None else asdict(report.divergence),
        "calibration": None if calibration is None else [calibration.count, keys, list(calibration.rank.values())],
        "percentile": None if calibration is None else [repr(value) for value in calibration.percentile.values()],
        "notes": list(report.notes),
        "provenance": dict(report.provenance),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.tmp.{path.name}")
    try:
        save_file(tensors, temporary, metadata={"gradreg": json.dumps(about)})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Read a file as the arguments of `SimilarityReport`."""
    _check_name(path)
    if not path.is_file():
        raise GradregError(f"{path} is no file; save a report there first.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as problem:
        raise GradregError(f"{path} is no whole safetensors file ({problem}).") from problem
    about = _about(path, metadata)
    try:
        return {
            "tokens_a": tuple(TokenRow(**token) for token in about["tokens_a"]),
            "tokens_b": tuple(TokenRow(**token) for token in about["tokens_b"]),
            "cells": tuple(
                Cell(group, kind, tuple(names), numel, tensors[f"gram/{i}"])
                for i, (group, kind, names, numel) in enumerate(about["cells"])
            ),
            "divergence": divergence_from(about["divergence"]),
            "calibration": _calibration(about, tensors),
            "notes": tuple(about["notes"]),
            "provenance": about["provenance"],
        }
    except (KeyError, TypeError, ValueError) as problem:
        raise GradregError(f"{path} says it is a report, but its description lacks or garbles {problem}.") from problem


def _calibration(about: dict[str, Any], tensors: dict[str, Tensor]) -> Calibration | None:
    if about["calibration"] is None:
        return None
    count, keys, ranks = about["calibration"]
    percentile = dict(zip(keys, map(float, about["percentile"]), strict=True))
    parts = {part: {key: tensors[f"{part}/{i}"] for i, key in enumerate(keys)} for part in _PAIRS}
    return Calibration(count, percentile, dict(zip(keys, ranks, strict=True)), **parts)


def _check_name(path: Path) -> None:
    if path.suffix != ".safetensors":
        raise GradregError(f"The path {str(path)!r} does not end in .safetensors; give one that does.")


def _about(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads(metadata["gradreg"])
        written = about["format"], int(about["version"])
    except (KeyError, TypeError, ValueError):
        about, written = {}, ("", 0)
    if written[0] != FORMAT:
        raise GradregError(f"{path} is a safetensors file, but not one that SimilarityReport.save wrote.")
    if written[1] > VERSION:
        raise GradregError(f"{path} has version {written[1]}; this gradreg reads versions up to {VERSION}.")
    return about
