"""Which sequence the queries and the keys of an attention map run over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.errors import BatchError, closest
from gradreg.scalars import IGNORED_LABEL

SOURCE, TARGET, CONTEXT = "source", "target", "context"

_CROSS = re.compile(r"cross|enc_?dec|encoder_?att|src_?att", re.IGNORECASE)
_ENCODER, _DECODER = re.compile(r"(?:^|\.)encoder(?:\.|$)"), re.compile(r"(?:^|\.)decoder(?:\.|$)")


@dataclass(frozen=True)
class Segment:
    """A sequence that attention runs over.

    Attributes:
        name: `"source"`: what the model reads. `"target"`: what a decoder reads. `"context"`: hidden states that a decoder
            is given from elsewhere.
        ids: Token ids `[n, L]`; None where they are not known.
        valid: Which positions are real, `[n, L]`; None if all are.
    """

    name: str
    ids: Tensor | None = None
    valid: Tensor | None = None


@dataclass(frozen=True)
class Side:
    """Maps of the same sort.

    Attributes:
        name: `"self"`; of encoder-decoder models `"encoder"`, `"decoder"` or `"cross"`.
        queries: Name of the segment of the queries.
        keys: Name of the segment of the keys.
    """

    name: str
    queries: str
    keys: str


def side_of(key: str, inner: nn.Module, batch: Batch) -> Side:
    """Return the sort of a map, by the names of its module and of the modules around it."""
    name = key.partition(":")[0]
    names = [own for own, _ in inner.named_modules(remove_duplicate=False)]
    cross = _is_cross(name, names)
    if not has_two_stacks(inner, batch):
        return Side("cross", SOURCE, CONTEXT) if cross else Side("self", SOURCE, SOURCE)
    if cross:
        return Side("cross", TARGET, SOURCE)
    return Side("decoder", TARGET, TARGET) if _DECODER.search(name) else Side("encoder", SOURCE, SOURCE)


def _is_cross(name: str, names: list[str]) -> bool:
    parent, _, own = name.rpartition(".")
    # of torch.nn.TransformerDecoderLayer, whose other one is self_attn
    beside_self = own == "multihead_attn" and f"{parent}.self_attn".lstrip(".") in names
    # the path up to the layer may name an encoder or a decoder; what it is stands behind the last number
    tail = re.split(r"\.\d+\.", name)[-1]
    return beside_self or _CROSS.search(tail) is not None or _CROSS.search(own) is not None


def has_two_stacks(inner: nn.Module, batch: Batch) -> bool:
    """Whether a model has an encoder and a decoder, which read different sequences."""
    declared = getattr(getattr(inner, "config", None), "is_encoder_decoder", None)
    if declared is not None:
        return bool(declared)
    if any(name.startswith("decoder_") for name in batch.input_names):
        return True
    names = [name for name, _ in inner.named_modules()]
    return any(_ENCODER.search(name) for name in names) and any(_DECODER.search(name) for name in names)


def segments_of(batch: Batch, valid: Tensor | Mapping[str, Tensor] | None) -> dict[str, Segment]:
    """Return the segments of a batch, with their token ids and real positions.

    Real positions are those of `attention_mask` and `decoder_attention_mask`; without the latter, targets end before labels
    that are ignored to the end. A decoder that is given no ids makes its own of the source, and ends where that does.

    Args:
        batch: The batch.
        valid: Real positions by the caller, which are taken instead: of the source, or by name of segment.

    Raises:
        BatchError: If given positions have no such shape, or belong to no segment.
    """
    named = batch.named_inputs()
    source, decoder = _mask(named.get("attention_mask")), named.get("decoder_input_ids")
    end = source if decoder is None else _before_ignored(batch.targets, decoder)
    found = {
        SOURCE: Segment(SOURCE, _ids(named.get("input_ids", named.get("inputs"))), source),
        TARGET: Segment(TARGET, _ids(decoder), _mask(named.get("decoder_attention_mask"), end)),
        CONTEXT: Segment(CONTEXT, None, _mask(named.get("encoder_attention_mask"))),
    }
    given = valid if isinstance(valid, Mapping) else {} if valid is None else {SOURCE: valid}
    for name, mask in given.items():
        if name not in found:
            raise BatchError(f"valid names the segment {name!r}; allowed are {closest(name, found)}.")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != len(batch):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise BatchError(
                f"valid[{name!r}] is {shape}; it says of every position whether it is real, [{len(batch)}, L]."
            )
        found[name] = Segment(name, found[name].ids, mask.bool())
    return found


def _ids(value: Any) -> Tensor | None:
    integer = isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
    return value if integer and value.dtype != torch.bool else None


def _mask(value: Any, otherwise: Tensor | None = None) -> Tensor | None:
    return value != 0 if isinstance(value, Tensor) and value.dim() == 2 else otherwise


def _before_ignored(labels: Any, ids: Any) -> Tensor | None:
    """Return which positions stand before labels that are ignored to the end, where labels are of tokens."""
    if not isinstance(labels, Tensor) or not isinstance(ids, Tensor) or labels.shape != ids.shape:
        return None
    return (labels != IGNORED_LABEL).flip(1).cumsum(1).flip(1) > 0
