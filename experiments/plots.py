"""Pictures of a run: accuracies per part with example collages, training curves, and all heads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import gradreg as gr
from gradreg.experiments.arms import UPPER_BOUND
from gradreg.experiments.data import Data
from gradreg.experiments.files import write_atomically
from gradreg.experiments.labels import arm_color, arm_label
from gradreg.experiments.run_directory import RunDirectory

__all__ = ["draw"]


def draw(run: RunDirectory, results: Mapping[str, Any], data: Data) -> list[Path]:
    """Write `plots/*.png`; arms without numbers for a picture are left out of it.

    Figures are made without pyplot, so no display is needed and nothing global is touched.
    """
    figures = {"curves": _curves(run.metrics.rows(), data)}
    if results["arms"]:
        figures |= {"results": _results(results, data), "heads": _all_heads(results, data)}
    paths = []
    for name, figure in figures.items():
        paths.append(run.path / "plots" / f"{name}.png")
        write_atomically(paths[-1], lambda path, figure=figure: figure.savefig(path, dpi=150))
    return paths


def _results(results: Mapping[str, Any], data: Data) -> Figure:
    """Bars per part, one color per arm, under a strip of example images."""
    images = _images(data.train)
    figure = Figure(figsize=(9, 5.6 if images is not None else 4), layout="constrained")
    bars = figure
    if images is not None:
        strip, bars = figure.subfigures(2, 1, height_ratios=(1, 2.7))
        _strip(strip, data)
    axes = bars.subplots()
    arms, parts = list(results["arms"]), list(results["parts"])
    chance, width = 1 / data.classes, 0.84 / len(arms)
    for number, arm in enumerate(arms):
        heights = [results["arms"][arm]["parts"][part]["test"] for part in parts]
        positions = np.arange(len(parts)) - 0.42 + width * (number + 0.5)
        drawn = axes.bar(positions, heights, width * 0.9, color=arm_color(arm, number), label=arm_label(arm))
        ink = "white" if arm == "penalty" else "#222222"
        size = 8 if len(arms) <= 4 else 6.5
        axes.bar_label(drawn, fmt="%.2f", fontsize=size, padding=-10, color=ink)  # inside, clear of the upper bound
    for position, part in enumerate(parts):
        bound = results["upper_bound"][part]
        if bound is not None:
            label = "upper bound: trained for that part alone" if position == 0 else None
            axes.hlines(bound, position - 0.46, position + 0.46, colors="black", linewidth=2, label=label)
    axes.axhline(chance, color="#333333", linestyle=":", linewidth=1, label="chance")
    axes.set(xticks=range(len(parts)), ylim=(chance - 0.06, 1.03), ylabel="test accuracy of the best head")
    axes.set_xticklabels([f"only {part} predictive" for part in parts])
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, frameon=False, fontsize=9)
    return figure


def _strip(figure: Any, data: Data, per_class: int = 2, most: int = 6) -> None:
    """Show training examples, then one test example per part, with the part that is predictive there outlined."""
    labels = data.train.targets.cpu().numpy()
    chosen = [(data.train, k, None) for label in (0, 1) for k in np.flatnonzero(labels == label)[:per_class]]
    chosen += [(data.test[part], 0, part) for part in data.parts[:most]]
    pictures = [_images(batch)[index] for batch, index, _ in chosen]
    low, high = np.percentile(np.stack(pictures), [0.5, 99.5])
    for axes, picture, (batch, index, part) in zip(figure.subplots(1, len(chosen)), pictures, chosen, strict=True):
        axes.imshow(picture, cmap="gray", vmin=low, vmax=high, interpolation="nearest")
        axes.set_title(f"{'train' if part is None else 'test'}, label {int(batch.targets[index])}", fontsize=8)
        axes.axis("off")
        for name, (top, left, height, width) in data.boxes.items():
            if part in (None, name):
                corner = (left - 0.5 + 0.25, top - 0.5 + 0.25)
                box = Rectangle(corner, width - 0.5, height - 0.5, fill=False, edgecolor="#f0b429", linewidth=1.6)
                axes.add_patch(box)
    if data.boxes:
        figure.suptitle(
            "outlined: the parts that tell the label; all in training, a single one in each test set", fontsize=10
        )


def _curves(rows: list[dict[str, Any]], data: Data) -> Figure:
    """Loss, penalties and best accuracy on validation data, over the steps."""
    names = list(dict.fromkeys(row["arm"] for row in rows if not row["arm"].startswith(UPPER_BOUND)))
    penalties = sorted({key.removesuffix("/weight") for row in rows for key in row if key.endswith("/weight")})
    panels = ["task", *penalties, *(f"validation/{part}" for part in data.parts)]
    columns = 3
    figure = Figure(figsize=(4 * columns, 2.6 * -(-len(panels) // columns)), layout="constrained")
    grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat
    for axes, panel in zip(grid, panels, strict=False):
        for number, name in enumerate(names):
            points = [(row["step"], row[panel]) for row in rows if row["arm"] == name and panel in row]
            if points:
                axes.plot(*zip(*points, strict=True), color=arm_color(name, number), label=arm_label(name))
        axes.set_title(_title(panel), fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel(_quantity(panel), fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if panel.startswith("validation/"):
            axes.set_ylim(1 / data.classes - 0.05, 1.02)
    for axes in grid:  # those left without a panel
        axes.axis("off")
    if names:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _title(panel: str) -> str:
    if panel.startswith("validation/"):
        return f"best head, only {panel.removeprefix('validation/')} predictive"
    return "task loss" if panel == "task" else panel.replace("_", " ")


def _quantity(panel: str) -> str:
    if panel == "task":
        return "loss, mean over heads"
    return "validation accuracy" if panel.startswith("validation/") else "penalty, before its weight"


def _all_heads(results: Mapping[str, Any], data: Data) -> Figure:
    """Accuracy of each head where one part alone tells the label: which heads specialize."""
    arms = list(results["arms"])
    figure = Figure(figsize=(9, 1.5 * len(arms) + 0.9), layout="constrained")
    image = None
    for axes, arm in zip(figure.subplots(len(arms), 1, squeeze=False).flat, arms, strict=True):
        scores = np.array([results["arms"][arm]["parts"][part]["test_of_all_heads"] for part in results["parts"]])
        order = np.lexsort((-scores.max(0), scores.argmax(0)))  # by the part a head is best at, then how good
        image = axes.imshow(scores[:, order], aspect="auto", vmin=1 / data.classes, vmax=1, cmap="viridis")
        axes.set(xticks=[], yticks=range(len(results["parts"])))
        axes.set_yticklabels(results["parts"], fontsize=8)
        axes.set_title(f"{arm_label(arm)}: {scores.shape[1]} heads, each a column", fontsize=9)
    figure.suptitle("rows: the part that alone tells the label", fontsize=9)
    figure.colorbar(image, ax=figure.axes, label="test accuracy")
    return figure


def _images(batch: gr.Batch) -> np.ndarray | None:
    """Return the examples as grey images `[n, height, width]`, or None if they are none."""
    inputs = batch.inputs
    if inputs.dim() == 4 and inputs.shape[1] in (1, 3):
        inputs = inputs.mean(1)
    return inputs.cpu().numpy() if inputs.dim() == 3 and len(batch) > 1 else None
