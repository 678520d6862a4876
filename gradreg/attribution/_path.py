"""Points between a start and the input, their weights, and what moves: the data of every gradient attribution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradreg.attribution._sources import Sources

__all__ = ["Path", "Units"]


@dataclass(frozen=True)
class Path:
    r"""M points $b + \alpha_m (x - b)$ per example, each starting at one of K starts, and sums of products over them.

    The result of a rule r is $\sum_m w_{rm} \langle \nabla f(x_m), x - b_m \rangle$, split over units.

    Args:
        sources: The values x.
        starts: From key to `[K, n, *shape]`, the starts b.
        alpha: `[n, M]`.
        which: `[M]`, the start that every point belongs to.
        weights: `[rules, M]`.
        replace: Whether values are put in place of those of the model; not needed at the input itself, where each key is then
            followed through all others.
    """

    sources: Sources
    starts: dict[str, Tensor]
    alpha: Tensor
    which: Tensor
    weights: Tensor
    replace: bool = True

    @property
    def examples(self) -> int:
        """The number n of examples."""
        return self.alpha.shape[0]

    @property
    def points(self) -> int:
        """The number M of points of every example."""
        return self.alpha.shape[1]

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return examples and points of some rows; an example's points follow each other."""
        rows = torch.arange(start, min(stop, self.examples * self.points), device=self.alpha.device)
        return rows // self.points, rows % self.points

    def values(self, examples: Tensor, points: Tensor) -> dict[str, Tensor]:
        """Return the values at rows, `[r, *shape]` per key; nothing where none are put in place."""
        if not self.replace:
            return {}
        found = {}
        for key, starts in self.starts.items():
            start = starts[self.which[points], examples]
            alpha = self.alpha[examples, points].to(start)
            found[key] = start + alpha.reshape(-1, *[1] * (start.dim() - 1)) * (
                self.sources.values[key][examples] - start
            )
        return found

    def moved(self, key: str, examples: Tensor, points: Tensor) -> Tensor:
        """Return x - b at rows, `[r, *shape]`."""
        return self.sources.values[key][examples] - self.starts[key][self.which[points], examples]


class Units:
    """What scores are given for: positions, or single features; and which of them a tangent has to move.

    Args:
        sources: The values.
        per: `"token"` or `"feature"`.
    """

    def __init__(self, sources: Sources, per: str) -> None:
        self.per = per
        self.shapes = {key: tuple(value.shape[1:]) for key, value in sources.values.items()}
        self.order = {key: self._order(sources, key) for key in sources.values}

    def count(self, key: str) -> int:
        """The number U of units of a key."""
        return self.shapes[key][0] if self.per == "token" else math.prod(self.shapes[key])

    def tangents(self, key: str, examples: Tensor | None = None) -> int:
        """The number of tangents that serve some examples, by default all: as many as the longest has real units."""
        order = self.order[key]
        if examples is not None:
            order = order[examples.unique()]
        return int((order >= 0).sum(1).max())

    def summed(self, key: str, products: Tensor) -> Tensor:
        """Sum products `[..., *shape]` within units: `[..., U]`."""
        axes = len(self.shapes[key])
        if self.per == "feature":
            return products.flatten(-axes) if axes else products.unsqueeze(-1)
        return products.flatten(1 - axes).sum(-1) if axes > 1 else products

    def directions(self, key: str, moved: Tensor, examples: Tensor, start: int, stop: int) -> Tensor:
        """Return tangents `[D, r, *shape]`: tangent d moves the d-th real unit of each row's example, and nothing else."""
        order = self.order[key][examples, start:stop].T  # [D, r]
        chosen = order.unsqueeze(-1) == torch.arange(self.count(key), device=order.device)  # [D, r, U]
        rest = 1 if self.per == "feature" else max(math.prod(self.shapes[key][1:]), 1)
        found = moved.reshape(len(examples), -1, rest) * chosen.unsqueeze(-1)
        return found.reshape(-1, *moved.shape)

    def placed(self, key: str, slots: Tensor) -> Tensor:
        """Return scores `[rules, n, *, U]` from those of tangents, `[rules, n, *, D]`."""
        order = self.order[key][:, : slots.shape[-1]]
        index = order.reshape(1, order.shape[0], *[1] * (slots.dim() - 3), order.shape[1]).expand_as(slots)
        # slots without a unit hold zero: they may be added anywhere
        found = slots.new_zeros(*slots.shape[:-1], self.count(key))
        return found.scatter_add(-1, index.clamp(min=0), slots)

    def shaped(self, key: str, scores: Tensor) -> Tensor:
        """Return scores `[..., U]` as they are handed out: `[..., L]` or `[..., *shape]`."""
        if self.per == "token":
            return scores
        return scores.unflatten(-1, self.shapes[key]) if self.shapes[key] else scores.squeeze(-1)

    def _order(self, sources: Sources, key: str) -> Tensor:
        """Return the real units of every example, `[n, U]`, packed to the left; -1 where there are no more."""
        value = sources.values[key]
        n, count = value.shape[0], self.count(key)
        units = torch.arange(count, device=value.device).expand(n, count)
        valid = sources.valid.get(key)
        if valid is None:
            return units
        if self.per == "feature":
            valid = valid.repeat_interleave(max(math.prod(self.shapes[key][1:]), 1), 1)
        packed = torch.where(valid, units, count).sort(1).values
        return torch.where(packed < count, packed, -1)
