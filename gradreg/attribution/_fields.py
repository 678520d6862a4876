"""The parts of an attribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradreg.attribution._check import check, plain

__all__ = ["Fields"]


@dataclass(frozen=True, eq=False, repr=False)
class Fields:
    """What `Attribution` is made of, checked and put in order; its documentation says what is what."""

    by_key: Mapping[str, Tensor]
    method: str
    per: str
    change: Tensor | None = None
    delta: Tensor | None = None
    error: Tensor | None = None
    target_axes: tuple[str, ...] = ()
    ids: Mapping[str, Tensor] = field(default_factory=dict)
    valid: Mapping[str, Tensor] = field(default_factory=dict)
    segments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, list[list[str]]] = field(default_factory=dict)
    target_labels: Mapping[str, list[Any]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)
        set_once = object.__setattr__  # frozen for others
        set_once(self, "target_axes", tuple(self.target_axes))
        set_once(self, "labels", {key: [list(row) for row in rows] for key, rows in self.labels.items()})
        names = {
            axis: [one if isinstance(one, str) else list(one) for one in own]
            for axis, own in self.target_labels.items()
        }
        set_once(self, "target_labels", names)
        set_once(self, "provenance", plain(self.provenance))

    @property
    def total(self) -> Tensor:
        """The sum of all scores of every target, without padded positions, `[n, *targets]`."""
        lead = 1 + len(self.target_axes)
        return sum(
            (self._real(key).flatten(lead).sum(-1) for key in self.by_key), start=torch.zeros(()).to(self._first)
        )

    @property
    def _first(self) -> Tensor:
        return next(iter(self.by_key.values()))

    def _real(self, key: str) -> Tensor:
        """Scores of a key, zero where positions are padded."""
        scores = self.by_key[key]
        if key not in self.valid:
            return scores
        valid = self.valid[key].to(scores.device)
        axes = [1] * len(self.target_axes)
        rest = [1] * (scores.dim() - 2 - len(axes))
        return scores.masked_fill(~valid.view(len(valid), *axes, -1, *rest), 0)
