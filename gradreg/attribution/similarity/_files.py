"""Similarity reports on disk."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from gradreg.attribution._archive import read, write
from gradreg.attribution.similarity._calibration import Calibration
from gradreg.attribution.similarity._findings import Findings
from gradreg.attribution.similarity._plain import divergence_from
from gradreg.attribution.similarity._rows import Cell, TokenRow
from gradreg.errors import GradregError

FORMAT = "gradreg.similarity"
VERSION = 1
_PAIRS = ("with_a", "with_b", "among")


def save(report: Findings, path: Path) -> None:
    tensors: dict[str, Tensor] = {f"gram/{i}": cell.gram for i, cell in enumerate(report.cells)}
    calibration = report.calibration
    keys = list(calibration.with_a) if calibration is not None else []
    if calibration is not None:
        for part in _PAIRS:
            tensors |= {f"{part}/{i}": getattr(calibration, part)[key] for i, key in enumerate(keys)}
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
    write(path, tensors, about)


def load(path: Path) -> dict[str, Any]:
    """Read a file as the arguments of `SimilarityReport`."""
    tensors, about = read(path, FORMAT, VERSION, "a similarity report")
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
