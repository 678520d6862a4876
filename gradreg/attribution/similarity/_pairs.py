"""The matrix over pairs of tokens, small enough to look at, and still summing to the cosine."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradreg.attribution.similarity._findings import Findings


class Pairs(NamedTuple):
    """What pairs of tokens add to the cosine.

    Args:
        places_a: Numbers of the tokens of a, by row.
        places_b: Those of b, by column.
        values: `[rows, columns]`; where tokens are left out, one more row or column holds their sum.
    """

    places_a: list[int]
    places_b: list[int]
    values: Tensor


def strongest_pairs(report: Findings, most: int) -> Pairs:
    """Return the matrix of at most so many tokens a side, those with the most in it; all others are summed."""
    values, places = report.token_pairs, []
    for _ in range(2):  # rows, then columns
        if len(values) <= most:
            places.append(list(range(len(values))))
        else:
            kept = values.abs().sum(1).argsort(descending=True, stable=True)[:most].sort().values
            rest = torch.ones(len(values), dtype=torch.bool)
            rest[kept] = False
            places.append(kept.tolist())
            values = torch.cat([values[kept], values[rest].sum(0, keepdim=True)])
        values = values.T
    return Pairs(places[0], places[1], values)
