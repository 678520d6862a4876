"""The table of a run, in Markdown, and the numbers behind it."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from gradreg.experiments.arms import UPPER_BOUND
from gradreg.experiments.labels import arm_label

__all__ = ["combine", "markdown", "markdown_table", "spread", "wrap"]

_ID = (
    " ID: test data in which all parts are predictive, over all heads (mean, best) and for the chosen heads in the order of "
    "the columns."
)
_BOUND = " The upper bound is a model trained for that part alone."


def combine(arms: Mapping[str, Mapping[str, Any]], parts: Sequence[str], selection: str, seed: int) -> dict[str, Any]:
    """Put the results of all arms together.

    Returns:
        `arms`, `upper_bound` (accuracy by part, None where not trained), `metric` (mean over parts of the chosen heads
        of the arm `penalty`, or of the first arm), `parts`, `selection`, `seed`.
    """
    compared = {name: dict(result) for name, result in arms.items() if not name.startswith(UPPER_BOUND)}
    bounds = {part: arms.get(UPPER_BOUND + part) for part in parts}
    upper = {part: bound["parts"][part]["test"] if bound else None for part, bound in bounds.items()}
    main = compared.get("penalty") or next(iter(compared.values()), None)
    scores = [main["parts"][part]["test"] for part in parts] if main else [v for v in upper.values() if v is not None]
    return {
        "metric": sum(scores) / len(scores),
        "seed": seed,
        "parts": list(parts),
        "selection": selection,
        "arms": compared,
        "upper_bound": upper,
    }


def markdown(results: Mapping[str, Any], regularizers: Sequence[str]) -> str:
    """Write the report of one run."""
    parts = results["parts"]
    rows = [
        [
            arm_label(name),
            *(_number(arm["parts"][part]["test"]) for part in parts),
            _number(arm["id_mean"]),
            _number(arm["id_best"]),
            " ".join(_number(arm["parts"][part]["id"]) for part in parts),
            f"{arm['seconds']:.0f} s",
        ]
        for name, arm in results["arms"].items()
    ]
    bounded = any(value is not None for value in results["upper_bound"].values())
    if bounded:
        rows.append(["upper bound", *(_number(results["upper_bound"][part]) for part in parts), "", "", "", ""])
    in_distribution = any(arm["id_mean"] is not None for arm in results["arms"].values())
    header = ["best head when only this part is predictive", *parts, "ID mean", "ID best", "ID of chosen", "time"]
    penalties = ", ".join(regularizers) or "none selected: the penalized arms train like the others"
    notes = [f"- {arm_label(name)}: {note}" for name, arm in results["arms"].items() for note in arm["notes"]]
    lines = [
        *markdown_table(header, rows),
        "",
        wrap(
            "Accuracy on test data. The head for each part is chosen on validation data in which only that part is "
            f"predictive (oracle selection; here: {results['selection']})." + in_distribution * _ID + bounded * _BOUND
        ),
        "",
        f"Regularizers: {penalties}. Seed: {results['seed']}.",
        *(["", "Warnings while training:", *notes] if notes else []),
    ]
    return "\n".join(lines) + "\n"


def wrap(text: str) -> str:
    """Break a paragraph into lines that fit a terminal."""
    return textwrap.fill(text, 120)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Write a table whose columns also line up as plain text; columns without any value are left out."""
    filled = [n for n in range(len(header)) if not rows or any(set(row[n]) - set("- ") for row in rows)]
    header, rows = [header[n] for n in filled], [[row[n] for n in filled] for row in rows]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * width if not at else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    return [line(header), line(rule), *(line(row) for row in rows)]


def spread(values: Sequence[float | None], number: str = ".3f") -> str:
    """Write mean ± standard deviation of those that are known; the mean alone where there is one."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = f"{statistics.mean(known):{number}}"
    return f"{mean} ± {statistics.stdev(known):{number}}" if len(known) > 1 else mean


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
