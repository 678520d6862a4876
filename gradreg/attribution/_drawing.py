"""What figures of attributions and reports share; matplotlib is imported where something is drawn."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

__all__ = ["AGAINST", "FOR", "as_written", "heat", "printable"]

FOR, AGAINST = "#2f6fde", "#d9730d"


def heat(axes: Any, grid: Any) -> Any:
    """Draw a matrix: white at zero, as dark on both sides as the largest number of it."""
    from matplotlib.colors import LinearSegmentedColormap

    largest = float(np.nanmax(np.abs(grid), initial=0.0)) or 1.0
    colors = LinearSegmentedColormap.from_list("against-for", [AGAINST, "white", FOR])
    return axes.imshow(grid, cmap=colors, vmin=-largest, vmax=largest, aspect="auto")


def printable(label: str) -> str:
    """Return a label as it can be drawn: white space alone as a sign, letters that the font lacks as their numbers."""
    text = label.strip().replace("\n", "\u23ce") or label.replace("\n", "\u23ce").replace(" ", "\u2423") or "\u2205"
    letters = _letters(_font())
    return "".join(one if ord(one) in letters else one.encode("ascii", "backslashreplace").decode() for one in text)


def _font() -> str:
    from matplotlib.font_manager import FontProperties, findfont

    return str(findfont(FontProperties()))


@functools.cache
def _letters(font: str) -> frozenset[int]:
    from matplotlib.font_manager import get_font

    return frozenset(get_font(font).get_charmap())


def as_written(axes: Any) -> None:
    """Keep dollar signs of tokens from being read as mathematics."""
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set_parse_math(False)
