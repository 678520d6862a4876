"""Where blocks of scores add up: a matrix, one matrix per layer, or a matrix of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Sink"]


class Sink:
    """Scores `[tests, trains]`, per layer a dictionary of them, per token `[tests, trains, tokens]`.

    Args:
        tests: Rows.
        trains: Columns.
        dtype: Of the scores.
    """

    def __init__(self, tests: int, trains: int, dtype: torch.dtype) -> None:
        self._shape, self._dtype = (tests, trains), dtype
        self.parts: dict[str, Tensor] = {}

    def add(self, key: str, tests: slice, trains: slice, block: Tensor) -> None:
        """Add a block `[tests, trains]` or `[tests, trains, tokens]`; sequences without a token have 0 there."""
        tokens = block.shape[2:]
        whole = self.parts.get(key)
        if whole is None:
            whole = torch.zeros(*self._shape, *tokens, dtype=self._dtype)
        if tokens and tokens[0] > whole.shape[2]:
            whole = F.pad(whole, (0, tokens[0] - whole.shape[2]))
        self.parts[key] = whole
        target = whole[tests, trains, : tokens[0]] if tokens else whole[tests, trains]
        target += block.to(whole)

    def scale(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every part by what a function of it gives."""
        self.parts = {key: change(part) for key, part in self.parts.items()}
