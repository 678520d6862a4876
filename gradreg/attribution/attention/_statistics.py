"""Sums over pairs of query and key: of attention, and of what gradients say of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PER_QUERY = ("attention", "weighted_gradient", "joint_score_gradient")
PER_PAIR = ("gradient", "signed_gradient", "centered_gradient", "score_gradient")
QUANTITIES = ("attention", *PER_PAIR, *PER_QUERY[1:])


@dataclass(frozen=True)
class Sums:
    """Sums over pairs of a query and a key that it sees, of one map; C kinds of keys, H heads.

    Attributes:
        values: From quantity to its sum, `[H, C]` for attention and `[H, C, *targets]` for gradients.
        pairs: Number of pairs, `[H, C]`.
        queries: Number of queries that see a key, `[H]`.
    """

    values: dict[str, Tensor]
    pairs: Tensor
    queries: Tensor

    def __add__(self, other: Sums) -> Sums:
        values = {name: value + other.values[name] for name, value in self.values.items()}
        return Sums(values, self.pairs + other.pairs, self.queries + other.queries)

    def means(self) -> dict[str, Tensor]:
        """Return the means; where there is no pair of a kind, zero."""
        found = {}
        for name, value in self.values.items():
            count = self.queries[:, None] if name in PER_QUERY else self.pairs
            count = count.clamp(min=1).reshape(*count.shape, *[1] * (value.dim() - 2))
            found[name] = value / count
        return found


def sums(weights: Tensor, gradient: Tensor, kinds: Tensor, queries: Tensor, keys: Tensor) -> Sums:
    """Sum a map over examples, queries and the keys of every kind.

    Args:
        weights: A, `[n, H, Q, K]`. Where it is zero the key is hidden from the query.
        gradient: G, `[n, *targets, H, Q, K]`.
        kinds: `[C, n, K]`.
        queries: Which queries count, `[n, Q]`.
        keys: Which keys are real, `[n, K]`.
    """
    dtype = torch.promote_types(weights.dtype, torch.float32)
    seen = (weights.detach() > 0) & queries[:, None, :, None] & keys[:, None, None, :]
    a = torch.where(seen, weights.to(dtype), 0)
    targets = gradient.shape[1:-3]
    g = gradient.to(dtype).flatten(1, -4) if targets else gradient.to(dtype).unsqueeze(1)  # [n, T, H, Q, K]
    a_, seen_ = a.unsqueeze(1), seen.unsqueeze(1)
    g = torch.where(seen_, g, 0)  # a hidden key has a gradient too, of what no model does
    weighted = a_ * g
    centered = torch.where(seen_, g - weighted.sum(-1, keepdim=True), 0)
    score = a_ * centered
    members = kinds.to(dtype)

    def total(value: Tensor) -> Tensor:
        found = torch.einsum("nthk,cnk->hct", value.sum(-2), members)
        return found.unflatten(-1, targets) if targets else found.squeeze(-1)

    found = {
        "attention": torch.einsum("nhk,cnk->hc", a.sum(-2), members),
        "gradient": total(g.abs()),
        "signed_gradient": total(g),
        "centered_gradient": total(centered.abs()),
        "score_gradient": total(score.abs()),
        "weighted_gradient": total(weighted),
        "joint_score_gradient": total(score),
    }
    pairs = torch.einsum("nhk,cnk->hc", seen.sum(-2).to(torch.float64), kinds.to(torch.float64)).long()
    return Sums(found, pairs, seen.any(-1).sum((0, 2)))
