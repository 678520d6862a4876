"""Attention reports on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gradreg.attribution._archive import read, write
from gradreg.attribution.attention._side import AttentionSide
from gradreg.errors import GradregError

__all__ = ["load", "save"]

FORMAT = "gradreg.attention_report"
VERSION = 1
_NAMES = ("layers", "maps", "kinds", "absent")
_COUNTS = ("pairs", "queries")


def save(path: Path, sides: Mapping[str, AttentionSide], about: Mapping[str, Any]) -> None:
    """Write a report; see `AttentionReport.save`."""
    tensors: dict[str, Tensor] = {}
    for place, side in enumerate(sides.values()):  # names of sides are any text, those in the file are numbers
        tensors |= {f"{place}/table/{name}": value for name, value in side.table.items()}
        tensors |= {f"{place}/{name}": getattr(side, name) for name in _COUNTS}
    described = [{"name": name, **{own: list(getattr(side, own)) for own in _NAMES}} for name, side in sides.items()]
    write(path, tensors, {"format": FORMAT, "version": VERSION, **about, "sides": described})


def load(path: Path) -> tuple[dict[str, AttentionSide], dict[str, Any]]:
    """Read a report; see `AttentionReport.load`.

    Raises:
        GradregError: If the file holds no report.
    """
    tensors, about = read(path, FORMAT, VERSION, "an attention report")
    try:
        sides = {}
        for place, described in enumerate(about["sides"]):
            start = f"{place}/table/"
            arguments: dict[str, Any] = {name: tuple(described[name]) for name in _NAMES}
            arguments |= {name: tensors[f"{place}/{name}"] for name in _COUNTS}
            table = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
            sides[described["name"]] = AttentionSide(name=described["name"], table=table, **arguments)
    except (KeyError, TypeError) as problem:
        raise GradregError(f"{path} says it is an attention report, but lacks or garbles {problem}.") from problem
    return sides, about
