"""The figure of Clark et al. 2019, redrawn: over layers, a dot for every head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradreg._files import write_durably
from gradreg.attribution.attention._side import AttentionSide
from gradreg.attribution.attention._statistics import QUANTITIES
from gradreg.attribution.attention._text import mean_over_targets
from gradreg.errors import UnknownNameError, closest

__all__ = ["LABELS", "SIGNED", "plot"]

# Distinct to readers with color blindness and in grey: Okabe and Ito's colors, each with a marker of its own
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#999999", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LABELS = {
    "attention": "average attention",
    "gradient": "|∂ f / ∂ attention|",
    "signed_gradient": "∂ f / ∂ attention",
    "centered_gradient": "|∂ f / ∂ attention|, row centered",
    "score_gradient": "|∂ f / ∂ score|",
    "weighted_gradient": "Σ attention * ∂ f / ∂ attention",
    "joint_score_gradient": "∂ f / ∂ scores of a kind",
}
_COLUMNS = 3
SIGNED = {"signed_gradient", "weighted_gradient", "joint_score_gradient"}


def plot(sides: Mapping[str, AttentionSide], path: Path | None, quantities: tuple[str, ...], title: str) -> Any:
    """Draw a row of panels for every side; see `AttentionReport.plot`."""
    from matplotlib.figure import Figure

    if not quantities:
        raise UnknownNameError(f"quantities is empty; there are {closest('', QUANTITIES, 9)}.")
    for quantity in quantities:
        if quantity not in QUANTITIES:
            raise UnknownNameError(
                f"There is no quantity {quantity!r} to draw; there are {closest(quantity, QUANTITIES, 9)}."
            )
    kinds = list(dict.fromkeys(kind for side in sides.values() for kind in side.kinds))
    layers = max(len(side.layers) for side in sides.values())
    wide = min(max(4.6, 0.5 * layers * max(1.0, len(kinds) / 3)), 12)
    # several sides have a row each, or as many as their quantities take
    lines = [quantities[start : start + _COLUMNS] for start in range(0, len(quantities), _COLUMNS)]
    rows = [(side, line) for side in sides.values() for line in lines]
    columns = max(map(len, lines))
    figure = Figure(figsize=(wide * columns, 0.7 + 3.4 * len(rows)), layout="constrained")
    shown: dict[str, Any] = {}
    for row, (side, line) in zip(figure.subplots(len(rows), columns, squeeze=False), rows, strict=True):
        for axes, quantity in zip(row, line, strict=False):
            _panel(axes, side, quantity, kinds)
            shown |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        for axes in row[len(line) :]:
            axes.set_axis_off()
    legend = figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=min(len(shown), 6), frameon=False, fontsize=9
    )
    figure.suptitle(title, fontsize=10, parse_math=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    if path is not None:
        write_durably(path, lambda file: figure.savefig(file, dpi=150, format="png"))
    return figure


def _panel(axes: Any, side: AttentionSide, quantity: str, kinds: list[str]) -> None:
    values = mean_over_targets(side.table[quantity]).numpy()  # [layers, heads, kinds]
    there = (side.pairs > 0).cpu().numpy()
    places = np.arange(len(side.layers))
    step = 0.8 / max(len(kinds), 1)
    for column, kind in enumerate(side.kinds):
        number = kinds.index(kind)
        color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
        at = (
            places + (number - (len(kinds) - 1) / 2) * step
        )  # beside each other: dots of several kinds would hide each other
        seen = there[:, :, column]
        x, y = np.broadcast_to(at[:, None], seen.shape)[seen], values[:, :, column][seen]
        axes.scatter(x, y, s=13, marker=marker, color=color, alpha=0.45, linewidths=0)
        rows = seen.any(1)
        means = values[:, :, column].sum(1)[rows] / seen.sum(1)[rows]
        axes.plot(at[rows], means, color=color, marker=marker, markersize=5, linewidth=1.6, label=kind)
    _scale(axes, values[there.any(-1)] if quantity == "attention" else values[there], quantity)
    axes.set_xticks(places, [str(number) for number in side.layers])
    axes.set(xlabel="layer", ylabel=LABELS[quantity])
    axes.set_title(f"{'' if side.name == 'self' else side.name + ': '}{quantity.replace('_', ' ')}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _scale(axes: Any, values: Any, quantity: str) -> None:
    if quantity == "attention":
        axes.set_ylim(-0.02, 1.02)
        return
    if quantity in SIGNED:
        axes.axhline(0, color="#333333", linewidth=0.8)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        return
    positive = values[values > 0]
    if positive.size and positive.max() > 30 * np.median(positive):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
