"""Attention reports as text and as plain values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradreg.attribution.attention._side import AttentionSide

_SHOWN = ("attention", "gradient", "centered_gradient", "score_gradient")
_WIDTH = 128


def side_as_lines(side: AttentionSide) -> list[str]:
    """Return a short table: means over heads, and over targets where there are several."""
    layers, heads = side.queries.shape
    what = "self-attention" if side.name.startswith("self") else f"{side.name} attention"
    queries = int(side.queries[0].max())
    lines = [
        f"{what}: {layers} layers of {heads} heads, {queries} queries; means over heads, of gradients without sign"
    ]
    if side.absent:
        lines.append(f"  absent: {', '.join(side.absent)}")
    lines += _table(side)
    return [line[: _WIDTH - 3] + "..." if len(line) > _WIDTH else line for line in lines]


def _table(side: AttentionSide) -> list[str]:
    blocks = [_block(side, quantity) for quantity in _SHOWN]
    index = ["", "layer", *(f"{number:>5}" for number in side.layers)]
    rows: list[str] = []
    while blocks:
        taken: list[list[str]] = []
        width = len(index[1])
        while blocks and (not taken or width + 3 + len(blocks[0][1]) <= _WIDTH):
            taken.append(blocks.pop(0))
            width += 3 + len(taken[-1][1])
        rows += [
            " | ".join([f"{left:<5}", *(block[line] for block in taken)]).rstrip() for line, left in enumerate(index)
        ]
    return rows


def _block(side: AttentionSide, quantity: str) -> list[str]:
    values = mean_over_targets(side.table[quantity]).mean(1)
    share = quantity == "attention"
    power = 0 if share or not bool(values.abs().max() > 0) else -math.floor(math.log10(float(values.abs().max()))) + 2
    seen = side.pairs.sum(1) > 0
    cells = [[kind[:11] for kind in side.kinds]]
    for row, there in zip((values * 10.0**power).tolist(), seen.tolist(), strict=True):
        cells.append([(f"{x:.3f}" if share else f"{x:.0f}") if ok else "-" for x, ok in zip(row, there, strict=True)])
    widths = [max(5 if share else 4, *(len(line[column]) for line in cells)) for column in range(len(side.kinds))]
    lines = [" ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells]
    head = quantity.replace("_", " ") + (f" x1e{power}" if power else "")
    width = max(len(head), len(lines[0]))
    return [f"{head:<{width}}", *(f"{line:>{width}}" for line in lines)]


def mean_over_targets(values: Tensor) -> Tensor:
    """Return `[layers, heads, kinds]`."""
    values = values.detach().to("cpu", torch.float64)
    return values.flatten(3).mean(3) if values.dim() > 3 else values


def side_as_dict(side: AttentionSide) -> dict[str, Any]:
    """Return plain values; None where a layer has no pair of a kind."""
    table = {}
    for quantity, values in side.table.items():
        there = (side.pairs > 0).cpu()
        table[quantity] = [
            [[cell if ok else None for cell, ok in zip(*head, strict=True)] for head in zip(*layer, strict=True)]
            for layer in zip(values.detach().tolist(), there.tolist(), strict=True)
        ]
    return {
        "layers": list(side.layers),
        "maps": list(side.maps),
        "kinds": list(side.kinds),
        "absent": list(side.absent),
        "pairs": side.pairs.tolist(),
        "queries": side.queries.tolist(),
        "table": table,
    }
