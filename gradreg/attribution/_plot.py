"""Attributions as figures; matplotlib without pyplot, so that no display is needed and nothing global is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradreg.attribution._check import EXAMPLE, number
from gradreg.attribution._drawing import AGAINST, FOR, as_written, heat, printable
from gradreg.attribution._fields import Fields
from gradreg.attribution._look import chosen, is_real, one_axis, target_name, target_names
from gradreg.errors import GradregError

__all__ = ["plot"]

_UNIT = "score, in units of the target"
_MOST_ROWS = 200  # of what can still be read, and drawn in seconds


def plot(a: Fields, example: int, target: int | Sequence[int | None] | None) -> Any:
    """Draw bars or a heat map; see `Attribution.plot`."""
    one_axis(a)
    axes = a.target_axes
    first = next(iter(a.by_key.values()))
    example = number(example, first.shape[0], EXAMPLE)
    if target is None and len(axes) <= 1:
        target = [None] * len(axes)
    given: list[int | None] = [target] if isinstance(target, int) else list(target or ())
    free = [n for n, one in enumerate(given) if one is None]
    if len(given) != len(axes) or len(free) > 1:
        sizes = ", ".join(f"{axis} {size}" for axis, size in zip(axes, first.shape[1:], strict=False))
        raise GradregError(
            f"target={target!r} does not say what to draw; the axes of targets are: {sizes or 'none'}. Give a number for "
            "each, and None for at most one of them, along which the heat map goes."
        )
    if not free:
        return _bars(a, example, [one for one in given if one is not None])
    return _heat_map(a, example, given, free[0])


def _bars(a: Fields, example: int, target: list[int]) -> Any:
    from matplotlib.figure import Figure

    names, values, segments = _sources(a, example, target)
    shown = _limited(len(names), "tokens")
    figure = Figure(figsize=(6, max(2.0, 1.2 + 0.24 * shown)), layout="constrained")
    axes = figure.subplots()
    rows = np.arange(len(names))
    axes.barh(rows, values, color=np.where(values >= 0, FOR, AGAINST))
    axes.axvline(0, color="#333333", linewidth=0.8)
    axes.set(yticks=rows, ylim=(len(names) - 0.5, -0.5), xlabel=_UNIT)
    axes.set_yticklabels(names)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _separate(axes, segments, horizontal=True)
    axes.set_title(_title(a, example, target), fontsize=10, parse_math=False)
    as_written(axes)
    return figure


def _heat_map(a: Fields, example: int, given: list[int | None], free: int) -> Any:
    from matplotlib.figure import Figure

    size = next(iter(a.by_key.values())).shape[1 + free]
    rows = []
    for place in range(_limited(size, f"targets along {a.target_axes[free]!r}")):
        names, values, segments = _sources(a, example, [place if one is None else one for one in given])
        rows.append(values)
    grid = np.stack(rows)
    _limited(len(names), "tokens")
    figure = Figure(figsize=(max(5.0, 2.6 + 0.3 * len(names)), max(3.2, 1.8 + 0.26 * size)), layout="constrained")
    axes = figure.subplots()
    image = heat(axes, grid)
    labels = [
        f"{n} {printable(own) if own else ''}".strip()
        for n, own in enumerate(own or "" for own in target_names(a, free, example))
    ]
    axes.set(xticks=range(len(names)), yticks=range(size), ylabel=a.target_axes[free])
    axes.set_xticklabels(names, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_yticklabels(labels)
    _separate(axes, segments, horizontal=False)
    axes.set_title(_title(a, example, given), fontsize=10, parse_math=False)
    figure.colorbar(image, ax=axes, label=_UNIT)
    as_written(axes)
    return figure


def _sources(a: Fields, example: int, target: list[int]) -> tuple[list[str], Any, list[tuple[int, str]]]:
    """Return names and scores of the real positions of all keys, and where each segment starts."""
    names: list[str] = []
    values: list[float] = []
    segments: list[tuple[int, str]] = []
    for key, scores, labels in chosen(a, example, target):
        segments.append((len(names), a.segments.get(key, key)))
        for place, (label, score) in enumerate(zip(labels, scores.double().tolist(), strict=True)):
            if is_real(a, key, example, place):
                names.append(printable(label))
                values.append(score)
    if not names:
        raise GradregError(f"Example {example} has no real positions to draw.")
    return names, np.array(values), segments


def _separate(axes: Any, segments: list[tuple[int, str]], *, horizontal: bool) -> None:
    if len(segments) < 2:
        return
    for start, name in segments:
        if horizontal:
            axes.axhline(start - 0.5, color="#888888", linewidth=0.8, linestyle=":")
            axes.annotate(name, (1, start - 0.4), xycoords=("axes fraction", "data"), ha="right", va="top", fontsize=8)
        else:
            axes.axvline(start - 0.5, color="#888888", linewidth=0.8, linestyle=":")
            axes.annotate(name, (start - 0.4, 1), xycoords=("data", "axes fraction"), va="bottom", fontsize=8)


def _limited(count: int, what: str) -> int:
    if count > _MOST_ROWS:
        raise GradregError(
            f"There are {count} {what}; a figure shows up to {_MOST_ROWS}. Take part of them with select(...)."
        )
    return count


def _title(a: Fields, example: int, given: Sequence[int | None]) -> str:
    fixed = [target_name(a, axis, one, example) for axis, one in enumerate(given) if one is not None]
    return ", ".join([a.method.replace("_", " "), f"{EXAMPLE} {example}", *fixed])
