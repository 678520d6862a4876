"""How far the scores of an index are from exact ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Verification", "compare", "spearman"]


@dataclass(frozen=True)
class Verification:
    """Scores of an index beside exact ones, on some training examples against each other.

    Attributes:
        examples: How many were taken.
        relative_error: Largest absolute difference over the largest absolute exact score.
        typical_error: Root mean square of the differences over that of the exact scores.
        spearman: Mean, over examples as tests, of the rank correlation of their scores with the others; NaN where it has no
            meaning (two examples, or constant scores).
        top_overlap: Share of the exact top tenth of every test that is in the index's top tenth.
    """

    examples: int
    relative_error: float
    typical_error: float
    spearman: float
    top_overlap: float

    def __str__(self) -> str:
        return (
            f"{self.examples} examples against each other: relative error {self.relative_error:.2g} (typical "
            f"{self.typical_error:.2g}), Spearman {self.spearman:.3f}, {self.top_overlap:.0%} of the top tenth found"
        )


def compare(found: Tensor, exact: Tensor) -> Verification:
    """Compare score matrices of examples with themselves, `[k, k]`; the diagonal counts for errors, not for ranks."""
    count = len(exact)
    found, exact = found.double(), exact.double()
    scale, typical = exact.abs().max(), exact.square().mean().sqrt()
    others = ~torch.eye(count, dtype=torch.bool)
    pairs = [(found[row][others[row]], exact[row][others[row]]) for row in range(count)]
    correlations = torch.tensor([spearman(first, second) for first, second in pairs], dtype=torch.float64)
    top = max(1, (count - 1) // 10)
    overlaps = [
        len(set(first.topk(top).indices.tolist()) & set(second.topk(top).indices.tolist())) / top
        for first, second in pairs
        if len(second)
    ]
    return Verification(
        count,
        float((found - exact).abs().max() / scale),
        float((found - exact).square().mean().sqrt() / typical),
        float(correlations.nanmean()),
        sum(overlaps) / len(overlaps) if overlaps else 1.0,
    )


def spearman(first: Tensor, second: Tensor) -> float:
    """Return the rank correlation, equal values sharing their mean rank; NaN if there is no spread.

    Example:
        >>> import torch
        >>> from gradreg.tracin.index import spearman
        >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 5.0, 7.0])), 6)
        1.0
    """
    if len(first) < 2:
        return float("nan")
    ranks = torch.stack([_ranks(first), _ranks(second)])
    centered = ranks - ranks.mean(1, keepdim=True)
    norms = centered.norm(dim=1)
    return float(centered[0] @ centered[1] / (norms[0] * norms[1]))


def _ranks(values: Tensor) -> Tensor:
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks: Tensor = (ends - (counts - 1) / 2)[inverse]
    return ranks
