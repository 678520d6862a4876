"""Attributions of texts as a table, as JSON, and as figures."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gradreg as gr
from gradreg.experiments.files import write_atomically
from gradreg.experiments.report import markdown_table
from gradreg.experiments.transformers.goals import Asked
from gradreg.experiments.transformers.load import Loaded

__all__ = ["Rows", "as_json", "as_rows", "draw"]

_MOST_LINES = 40
_MOST_PLOTS = 8


@dataclass(frozen=True)
class Rows:
    """One row per target that is shown: as data, and as the lines of a table."""

    data: list[dict[str, Any]]
    table: list[str]


def as_rows(found: gr.Attribution, question: Asked, loaded: Loaded, k: int) -> Rows:
    """Return the largest scores of every target that the question is about.

    Args:
        found: The attribution, of tokens or words.
        question: What was asked.
        loaded: The model, which tells the values of the targets.
        k: How many scores.
    """
    with torch.no_grad():
        values = question.of(loaded.model(**question.batch.named_inputs()), question.batch)
    relative, data = found.relative_delta, []
    for example, target in _targets(found, question):
        place = (example, *target)
        row: dict[str, Any] = {"example": example, "target": list(target)}
        row["name"] = _title(found, question, example, target)
        row["value"] = _number(values[place])
        for name, own in (("change", found.change), ("delta", found.delta), ("error", found.error)):
            row[name] = None if own is None else _number(own[place])
        row["relative_delta"] = None if relative is None else _number(relative[place])
        row["largest"] = [
            {"key": one.key, "position": one.position, "label": one.label, "score": _number(torch.tensor(one.score))}
            for one in found.top(k, example=example, target=target)
        ]
        data.append(row)
    header = ["target", "value", "change", "gap", "largest scores"]
    lines = [
        [
            row["name"].replace("|", "\\|"),
            _text(row["value"]),
            _text(row["change"]),
            "" if row["relative_delta"] is None else f"{100 * row['relative_delta']:.1g} %",
            ", ".join(f"{one['label'].strip() or repr(one['label'])} {_text(one['score'])}" for one in row["largest"]),
        ]
        for row in data[:_MOST_LINES]
    ]
    rest = [f"... and {len(data) - _MOST_LINES} more targets"] if len(data) > _MOST_LINES else []
    if found.change is not None:
        rest += ["", "change: value minus the value at the baseline; scores sum to it, but for the gap."]
    return Rows(data, [*markdown_table(header, lines), *rest])


def as_json(found: gr.Attribution, rows: Rows, loaded: Loaded, goal: str) -> dict[str, Any]:
    """Return what `attribution.json` holds; all numbers are in the safetensors file."""
    return {
        "model": loaded.name,
        "goal": goal,
        "method": found.method,
        "sources": found.provenance.get("sources", "tokens"),
        "labels": found.labels,
        "targets": rows.data,
        "provenance": found.provenance,
    }


def draw(found: gr.Attribution, question: Asked, folder: Path) -> list[Path]:
    """Write a figure for each of the first examples: its only target, or a heat map of those that the question is about."""
    paths = []
    for example in range(min(len(question.batch), _MOST_PLOTS)):
        if len(found.target_axes) <= 1:
            figure = found.plot(example)
        else:
            best = [target[-1] for one, target in _targets(found, question) if one == example]
            figure = found.plot(example, (None, max(set(best), key=best.count)))
        paths.append(folder / f"example-{example}.png")
        write_atomically(paths[-1], lambda path, figure=figure: figure.savefig(path, dpi=150))
    return paths


def _targets(found: gr.Attribution, question: Asked) -> list[tuple[int, tuple[int, ...]]]:
    if question.main is not None:
        return [(example, target) for example, own in enumerate(question.main) for target in own]
    shape = next(iter(found.by_key.values())).shape[1 : 1 + len(found.target_axes)]
    return [(n, target) for n in range(len(question.batch)) for target in itertools.product(*map(range, shape))]


def _title(found: gr.Attribution, question: Asked, example: int, target: tuple[int, ...]) -> str:
    title = question.titles[example] if question.titles else f"example {example}"
    return ", ".join(filter(None, [title, found.target_name(target, example=example)]))


def _number(value: torch.Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:+.3g}"
