"""Other examples, to say whether a cosine is high."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.attribution.similarity._example import Example, read_batch, read_examples
from gradreg.attribution.similarity._grams import Side
from gradreg.attribution.similarity._texts import Special
from gradreg.batch import Batch
from gradreg.errors import BatchError
from gradreg.scalars import ScalarFunction

AS_GIVEN, NO_END, NO_SPECIAL = "as given", "without the end token", "without special tokens"


@dataclass(frozen=True, eq=False)
class Calibration:
    """How the cosine of a and b compares with those of other pairs of the same data.

    Attributes:
        count: Other examples, k.
        percentile: Share of pairs with at least one of the others whose cosine is lower, in percent (half of equal ones
            count), by what was left out: `"as given"`, `"without the end token"`, `"without special tokens"`.
        rank: Place of b among b and the others, ordered by cosine with a; 1 is the nearest.
        with_a: From the same keys to the cosines of a with every other, `[k]`; NaN where nothing is left.
        with_b: Of b with every other.
        among: Of the others with each other, `[k (k - 1) / 2]`.
    """

    count: int
    percentile: Mapping[str, float]
    rank: Mapping[str, int]
    with_a: Mapping[str, Tensor]
    with_b: Mapping[str, Tensor]
    among: Mapping[str, Tensor]

    def reference(self, key: str = AS_GIVEN) -> Tensor:
        """Return the cosines that the percentile is taken among."""
        found = torch.cat([self.with_a[key], self.with_b[key], self.among[key]])
        return found[~found.isnan()]


def read_others(given: Any, model: nn.Module, of: ScalarFunction | None) -> list[tuple[Batch, list[Example]]]:
    """Read calibration examples: a batch of k, or a list of batches.

    Raises:
        BatchError: If there is none, or one does not fit.
    """
    items = given if _is_list(given) else [given]
    if not items:
        raise BatchError("calibration is an empty list; give at least one other example, or None.")
    found = []
    for k, item in enumerate(items):
        name = f"calibration[{k}]" if _is_list(given) else "calibration"
        batch = read_batch(item, model, name)
        found.append((batch, read_examples(model, batch, of, name)))
    return found


def _is_list(given: Any) -> bool:
    """Tell a list of batches from a pair (inputs, targets)."""
    if not isinstance(given, (list, tuple)):
        return False
    return not (len(given) == 2 and isinstance(given[0], Tensor))


def left_out(a: Example, b: Example, special: Special) -> dict[str, frozenset[int]]:
    """Return what is left out of every calibration example: only what also changes a or b."""
    ids = set(a.ids or ()) | set(b.ids or ())
    keys: dict[str, frozenset[int]] = {AS_GIVEN: frozenset()}
    if ids & special.ends:
        keys[NO_END] = special.ends
    if ids & (special.all - special.ends):
        keys[NO_SPECIAL] = special.all
    return keys


def other_sides(others: Sequence[tuple[Batch, list[Example]]], dropped: Mapping[str, frozenset[int]]) -> list[Side]:
    """Return a row per other example and key: sums over its tokens without the dropped ids."""
    sides = []
    for batch, examples in others:
        weights = []
        for example in examples:
            for ids in dropped.values():
                row = torch.zeros(example.values.numel())
                labels = example.ids or (None,) * len(example.positions)
                row[[place for place, one in zip(example.positions, labels, strict=True) if one not in ids]] = 1
                weights.append(row)
        rows = tuple(i for i in range(len(examples)) for _ in dropped)
        sides.append(Side(batch, rows, torch.stack(weights), examples[0].of, examples[0].output_bytes))
    return sides


def calibrate(total: Tensor, tokens: tuple[int, int], weights: Mapping[str, tuple[Tensor, Tensor]]) -> Calibration:
    """Compare a and b with the others.

    Args:
        total: Gram matrix of the tokens of a, of b, then of the rows of the others, example-major.
        tokens: How many tokens a and b have.
        weights: By key, the weights of the tokens of a and b.
    """
    first = sum(tokens)
    k = (len(total) - first) // len(weights)
    with_a, with_b, among, percentile, rank = {}, {}, {}, {}, {}
    for place, (key, (weight_a, weight_b)) in enumerate(weights.items()):
        rows = torch.arange(k) * len(weights) + place + first
        left = torch.zeros(k + 2, len(total), dtype=torch.float64)
        left[0, : tokens[0]] = weight_a
        left[1, tokens[0] : first] = weight_b
        left[torch.arange(k) + 2, rows] = 1
        gram = left @ total @ left.T
        norms = gram.diagonal().clamp(min=0).sqrt()
        cosines = gram / (norms[:, None] * norms[None, :])  # 0 / 0 is NaN: nothing is left
        with_a[key], with_b[key] = cosines[0, 2:], cosines[1, 2:]
        among[key] = cosines[2:, 2:][tuple(torch.triu_indices(k, k, 1))]
        reference = torch.cat([with_a[key], with_b[key], among[key]])
        reference = reference[~reference.isnan()]
        own = cosines[0, 1]
        if own.isnan() or not len(reference):
            percentile[key], rank[key] = float("nan"), 0
            continue
        below = (reference < own).double() + 0.5 * (reference == own).double()
        percentile[key] = 100 * float(below.mean())
        rank[key] = 1 + int((with_a[key] > own).sum())
    return Calibration(k, percentile, rank, with_a, with_b, among)
