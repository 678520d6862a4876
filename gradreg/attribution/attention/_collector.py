"""From maps and their gradients to the parts of a report."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.attribution.attention._kinds import ALL, Kinds, kinds_of
from gradreg.attribution.attention._segments import SOURCE, Segment, Side, has_two_stacks, side_of
from gradreg.attribution.attention._side import AttentionSide
from gradreg.attribution.attention._statistics import Sums, sums
from gradreg.batch import Batch
from gradreg.engine import PointRecord
from gradreg.errors import BatchError, GradregError, NonFiniteLossError, closest
from gradreg.scalars import is_causal_language_model

_ORDER = ("self", "encoder", "decoder", "cross")


class Collector:
    """Reads records of maps with the kinds of their tokens, and puts what it found in order."""

    def __init__(
        self,
        inner: nn.Module,
        batch: Batch,
        kinds: Kinds,
        tokenizer: Any,
        queries: tuple[str, ...] | None,
        segments: dict[str, Segment],
    ) -> None:
        self.inner, self.batch, self.queries, self.segments = inner, batch, queries, segments
        self.kinds, self.tokenizer = kinds, tokenizer
        self.causal = is_causal_language_model(inner)
        self.side: dict[str, Side] = {}
        self._masks: dict[str, dict[str, Tensor]] = {}

    def check(self) -> None:
        """Read what can be read before the model runs: the kinds of the only sequence.

        Raises:
            GradregError: If they do not fit.
        """
        if not has_two_stacks(self.inner, self.batch):
            self.masks(SOURCE)

    def summed(self, record: PointRecord) -> dict[str, Sums]:
        """Return the sums of every map."""
        for key in record.points:
            self.side.setdefault(key, side_of(key, self.inner, self.batch))
        return {
            key: self._one(key, weights, record.gradients[key], record.rows) for key, weights in record.points.items()
        }

    def _one(self, key: str, weights: Tensor, gradient: Tensor, rows: slice) -> Sums:
        for what, value in (("attention", weights), ("gradient", gradient)):
            if bool(value.isnan().any()):
                row = int(value.isnan().flatten(1).any(1).nonzero()[0])
                raise NonFiniteLossError(
                    f"The {what} of {key!r} is NaN in example {rows.start + row}. Look at the weights, and at what this example "
                    "makes of them."
                )
        side = self.side[key]
        counted = self._real(key, side.queries, weights.shape[2], weights.device)
        keys = self._real(key, side.keys, weights.shape[3], weights.device)
        masks = self.masks(side.keys)
        if self.queries is not None:
            own = self.masks(side.queries)
            chosen = [own[name] for name in self._wanted() if name in own]
            self._check_length(key, side.queries, weights.shape[2], *chosen)
            counted = counted & (torch.stack(chosen).any(0) if chosen else torch.zeros_like(counted))
        self._check_length(key, side.keys, weights.shape[3], *masks.values())
        members = torch.stack(list(masks.values())) if masks else torch.ones_like(keys)[None]
        return sums(weights, gradient, members[:, rows].to(weights.device), counted[rows], keys[rows])

    def masks(self, name: str) -> dict[str, Tensor]:
        """Return the kinds of a segment; none where it has but one."""
        if name not in self._masks:
            several = len({own for side in self.side.values() for own in (side.queries, side.keys)}) > 1
            segment = self.segments[name]
            self._masks[name] = kinds_of(
                segment, self.kinds, self.tokenizer, len(self.batch), several=several, causal=self.causal
            )
        return self._masks[name]

    def sides(self, totals: dict[str, Sums]) -> dict[str, AttentionSide]:
        """Return the report's parts, in which layers have as many heads, in order of the layers."""
        groups: dict[tuple[str, int], list[str]] = {}
        for key, total in totals.items():
            groups.setdefault((self.side[key].name, len(total.queries)), []).append(key)
        found = {}
        for name in _ORDER:
            same = [(heads, keys) for (own, heads), keys in groups.items() if own == name]
            for heads, keys in same:
                keys = [key for key in sorted(keys, key=_numbers) if bool(totals[key].queries.any())]
                if keys:
                    title = name if len(same) == 1 else f"{name}, {heads} heads"
                    found[title] = self._side(title, keys, totals)
        return found

    def _side(self, title: str, keys: list[str], totals: dict[str, Sums]) -> AttentionSide:
        names = list(self.masks(self.side[keys[0]].keys)) or [ALL]
        pairs = torch.stack([totals[key].pairs for key in keys])
        there = [place for place in range(len(names)) if bool(pairs[:, :, place].any())]
        means = [totals[key].means() for key in keys]
        return AttentionSide(
            title,
            _layers(keys),
            tuple(keys),
            tuple(names[place] for place in there),
            tuple(name for place, name in enumerate(names) if place not in there),
            {name: torch.stack([mean[name][:, there] for mean in means]) for name in means[0]},
            pairs[:, :, there],
            torch.stack([totals[key].queries for key in keys]),
        )

    def _wanted(self) -> tuple[str, ...]:
        known = dict.fromkeys(name for side in self.side.values() for name in self.masks(side.queries))
        for name in self.queries or ():
            if name not in known:
                raise GradregError(f"queries names the kind {name!r}; there are {closest(name, known)}.")
        return self.queries or ()

    def _real(self, key: str, segment: str, length: int, device: torch.device) -> Tensor:
        valid = self.segments[segment].valid
        if valid is None:
            return torch.ones(len(self.batch), length, dtype=torch.bool, device=device)
        self._check_length(key, segment, length, valid)
        return valid.to(device)

    def _check_length(self, key: str, segment: str, length: int, *masks: Tensor) -> None:
        for mask in masks:
            if mask.shape[1] != length:
                raise BatchError(
                    f"The map {key!r} has {length} positions along the {segment}, the masks and ids of the batch "
                    f"{mask.shape[1]}: the model adds or leaves out some. Give kinds and valid as masks [n, {length}]."
                )


def _numbers(key: str) -> tuple[int, ...]:
    """Sort by the numbers in a module's name, then by call; the order of hooks is no order of layers."""
    return tuple(int(number) for number in re.findall(r"(?<=[.#])\d+|^\d+", key))


def _layers(keys: list[str]) -> tuple[int, ...]:
    """Return the numbers of layers: the first in a module's name, or where layers share a module its calls, or the place."""
    for pattern in (r"(?:^|\.)(\d+)(?:[.:])", r"#(\d+)$"):
        found = [int(match.group(1)) for key in keys if (match := re.search(pattern, key))]
        if len(set(found)) == len(keys):
            return tuple(found)
    return tuple(range(len(keys)))
