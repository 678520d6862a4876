"""The maps of one sort in a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradreg.attribution.attention._kinds import ALL
from gradreg.errors import UnknownNameError, closest

__all__ = ["AttentionSide"]


@dataclass(frozen=True, eq=False)
class AttentionSide:
    """Maps of one sort: self-attention, or that of the encoder, of the decoder, or across.

    Args:
        name: `"self"`, `"encoder"`, `"decoder"` or `"cross"`.
        layers: Number of every layer, in order.
        maps: Result key of every layer's map.
        kinds: Kinds of keys that occur.
        absent: Kinds that no query sees; nothing is said of them.
        table: From quantity to its values, `[layers, heads, kinds]`, those of gradients `[layers, heads, kinds, *targets]`.
        pairs: How many pairs of query and key a mean goes over, `[layers, heads, kinds]`; where there is none the value is zero.
        queries: How many queries, `[layers, heads]`.
    """

    name: str
    layers: tuple[int, ...]
    maps: tuple[str, ...]
    kinds: tuple[str, ...]
    absent: tuple[str, ...]
    table: Mapping[str, Tensor]
    pairs: Tensor
    queries: Tensor

    def get(self, quantity: str, kind: str) -> Tensor:
        """Return one quantity for one kind, `[layers, heads, *targets]`.

        Raises:
            UnknownNameError: If there is none such.
        """
        if quantity not in self.table:
            raise UnknownNameError(f"There is no quantity {quantity!r}; there are {closest(quantity, self.table, 9)}.")
        if kind not in self.kinds:
            gone = " It was asked for, but no query sees such a key." if kind in self.absent else ""
            if tuple(self.kinds) == (ALL,):
                gone = " Give attention_report tokenizer=, which tells special tokens and punctuation, or kinds=."
            raise UnknownNameError(f"There is no kind {kind!r}; there are {closest(kind, self.kinds, 9)}.{gone}")
        return self.table[quantity][:, :, self.kinds.index(kind)]
