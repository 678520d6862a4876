"""The report as a figure: the matrix over pairs of tokens, and the cosines of the what-ifs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gradreg._files import write_durably
from gradreg.attribution._drawing import AGAINST, FOR, as_written, heat, printable
from gradreg.attribution.similarity._findings import Findings
from gradreg.attribution.similarity._pairs import strongest_pairs
from gradreg.attribution.similarity._rows import TokenRow

_MOST_TOKENS = 40  # a side; of what can still be read
_MOST_NUMBERS = 12  # a side; more would not fit into the cells
_LONGEST = 16  # letters of a token


def plot(report: Findings, path: Path | None, title: str | None) -> Any:
    """Draw both; see `SimilarityReport.plot`."""
    from matplotlib.figure import Figure

    rows, columns, grid = _matrix(report)
    changes = report.what_ifs
    matrix = grid.size > 1  # one class a side: the matrix is the cosine
    widths = [max(3.0, 2.4 + 0.42 * len(columns)), 5.2] if matrix else [5.2]
    height = max(2.4, 1.6 + 0.34 * max(len(rows) if matrix else 0, len(changes)))
    figure = Figure(figsize=(sum(widths), height), layout="constrained")
    panels = figure.subplots(1, len(widths), squeeze=False, gridspec_kw={"width_ratios": widths})[0]
    if matrix:
        axes = panels[0]
        image = heat(axes, grid)
        axes.set(xticks=range(len(columns)), yticks=range(len(rows)), xlabel="b", ylabel="a")
        axes.set_xticklabels(columns, rotation=60, ha="right", rotation_mode="anchor")
        axes.set_yticklabels(rows)
        if max(grid.shape) <= _MOST_NUMBERS:
            _numbers(axes, grid, image.norm.vmax)
        axes.set_title(f"pairs of tokens; sum: cosine {report.cosine:.4f}", fontsize=10)
        figure.colorbar(image, ax=axes, label="added to the cosine", fraction=0.05)
        as_written(axes)
    _bars(panels[-1], {name: found.cosine for name, found in changes.items()}, len(rows) if matrix else 0)
    if title is not None:
        figure.suptitle(
            "\n".join(_short(printable(line), 100) for line in title.splitlines()), fontsize=10, parse_math=False
        )
    if path is not None:
        write_durably(path, lambda file: figure.savefig(file, dpi=150, format="png"))
    return figure


def _matrix(report: Findings) -> tuple[list[str], list[str], Any]:
    pairs = strongest_pairs(report, _MOST_TOKENS)
    rows = _names(report.tokens_a, pairs.places_a)
    return rows, _names(report.tokens_b, pairs.places_b), pairs.values.numpy()


def _names(tokens: tuple[TokenRow, ...], places: list[int]) -> list[str]:
    names = [printable(tokens[place].text) for place in places]
    names = [_short(name, _LONGEST) for name in names]
    left = len(tokens) - len(places)
    return [*names, f"{left} others"] if left else names


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _numbers(axes: Any, grid: Any, largest: float) -> None:
    for (row, column), value in np.ndenumerate(grid):
        # dark letters can be read on all but the strongest blue
        color = "white" if value > 0.75 * largest else "#1a1a1a"
        axes.text(
            column, row, f"{value:+.2f}".replace("-", "\u2212"), ha="center", va="center", fontsize=8, color=color
        )


def _bars(axes: Any, cosines: dict[str, float | None], rows: int) -> None:
    values = np.array([np.nan if one is None else one for one in cosines.values()])
    places = np.arange(len(values))
    shown = np.nan_to_num(values)
    axes.barh(places, shown, color=np.where(shown >= 0, FOR, AGAINST), height=0.62)
    for place, value in zip(places, values, strict=True):
        text = "nothing left" if np.isnan(value) else f"{value:+.3f}".replace("-", "\u2212")
        left = value < 0
        at, side = (value, "right") if left else (0.0 if np.isnan(value) else value, "left")
        axes.annotate(
            text, (at, place), (-3 if left else 3, 0), textcoords="offset points", ha=side, va="center", fontsize=8
        )
    axes.axvline(0, color="#333333", linewidth=0.8)
    # room for the numbers beside the bars
    lowest, highest = min(0.0, shown.min(initial=0)), max(0.0, shown.max(initial=0))
    axes.set(yticks=places, ylim=(max(len(values), rows) - 0.5, -0.5), xlabel="cosine")  # as thick as rows
    axes.set_xlim(lowest - (0.3 if lowest < 0 else 0), highest + 0.3)
    axes.set_yticklabels(list(cosines))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title("what if", fontsize=10)
