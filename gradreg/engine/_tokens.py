"""Batches of tokens: which embedding reads them, and the positions of left-padded rows; found by measurement, once a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradreg.batch import Batch, substituted
from gradreg.errors import BatchError, GradregWarning, warn
from gradreg.model import (
    Ensemble,
    SharedBase,
    at_rest,
    call,
    check_readable,
    input_embeddings,
    walk,
)
from gradreg.scalars import read_outputs

_FIRINGS: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], dict[str, int]]] = WeakKeyDictionary()

# Whether left-padded rows are given position_ids from their mask
_TAKES_POSITIONS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


# Shares of the largest output: what rounding does, and what is another position
_ROUNDING, _SHIFTED = 1e-5, 1e-3


def token_embeddings(inner: nn.Module, batch: Batch) -> dict[str, int]:
    """Return the embeddings that read the inputs, with their calls a forward.

    Where the module that a model names as its own shares its weight with others, those that a forward on two examples calls
    are taken: models of which only the encoder is in use name one that is never called. The same where the output of the
    encoder is among the inputs.
    """
    known = _FIRINGS.setdefault(inner, {})
    given = tuple(name for name, value in batch.named_inputs().items() if value is not None)
    if given not in known:
        known[given] = _found(inner, batch, "encoder_outputs" in given)
    return known[given]


def _found(inner: nn.Module, batch: Batch, encoded: bool) -> dict[str, int]:
    firings = input_embeddings(inner)
    named = dict(walk(inner))
    weights = {id(getattr(named[name], "weight", None)) for name in firings}
    siblings = {
        name: module
        for name, module in named.items()
        if isinstance(module, nn.Embedding) and id(module.weight) in weights
    }
    if encoded or not siblings.keys() <= firings.keys():
        calls = _calls(inner, batch[:2], {**siblings, **{name: named[name] for name in firings}})
        if any(calls.values()) and (encoded or not all(calls[name] for name in firings)):
            return {name: count for name, count in calls.items() if count}
    return firings


def _calls(inner: nn.Module, batch: Batch, modules: Mapping[str, nn.Module]) -> dict[str, int]:
    calls = dict.fromkeys(modules, 0)

    def counting(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            calls[name] += 1

        return hook

    handles = [module.register_forward_hook(counting(name)) for name, module in modules.items()]
    try:
        with at_rest(inner):
            call(inner, batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def prepared(inner: nn.Module, batch: Batch) -> Batch:
    """Return a batch of tokens as the model needs it: rows that are padded on the left get their `position_ids`.

    Without them a model with learned positions reads shifted ones. They are given where a measurement on one row shows that
    they make the row what it is without padding, and a model that takes none is warned of.

    Raises:
        BatchError: If the attention mask hides all tokens of an example: such an example has no defined output. If a cache is
            among the inputs: every forward would write to it. If the model cannot read it; see `check_readable`.
    """
    check_readable(inner, batch)
    for name, value in batch.named_inputs().items():
        if hasattr(value, "get_seq_length"):
            raise BatchError(
                f"Input {name!r} is a {type(value).__name__}, which every forward writes to: a second one would see another "
                "model. Pass whole sequences, without what was computed before."
            )
    mask = _mask(batch)
    if mask is None:
        return batch
    empty = (mask != 0).sum(1) == 0
    if bool(empty.any()):
        raise BatchError(
            f"attention_mask hides every token of example {int(empty.nonzero()[0])}: its output is not defined. Leave such "
            "examples out."
        )
    left = mask[:, 0] == 0
    if "position_ids" in batch.input_names or "input_ids" not in batch.input_names or not bool(left.any()):
        return batch
    if inner not in _TAKES_POSITIONS:
        row = int(left.nonzero()[0])
        _TAKES_POSITIONS[inner] = _measured(inner, batch[row : row + 1])
    return substituted(batch, {"position_ids": positions(mask)}) if _TAKES_POSITIONS[inner] else batch


def positions(mask: Tensor) -> Tensor:
    """Return the position of every token among the visible ones of its row, from 0; hidden ones before it get 0."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def _mask(batch: Batch) -> Tensor | None:
    if not isinstance(batch.inputs, Mapping):
        return None
    mask = batch.inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or torch._C._functorch.is_functorch_wrapped_tensor(mask):
        return None
    # numbers that are added to scores hide by being negative, and zero is visible
    return None if mask.is_floating_point() and bool(((mask != 0) & (mask != 1)).any()) else mask


def _may_take_positions(inner: nn.Module) -> bool:
    if isinstance(inner, SharedBase):
        return _may_take_positions(inner.base)
    if isinstance(inner, Ensemble):
        return all(map(_may_take_positions, inner.models))
    return "position_ids" in inspect.signature(inner.forward).parameters


def _measured(inner: nn.Module, row: Batch) -> bool:
    """Whether positions from its mask make a left-padded row what it is without padding, or do no harm at least."""
    mask = row.inputs["attention_mask"]
    visible = mask[0] != 0
    named = row.named_inputs()
    trimmed = {name: value[:, visible] if _like(value, mask) else value for name, value in named.items()}
    ways = [trimmed, named]
    if _may_take_positions(inner):
        ways.append({**named, "position_ids": positions(mask)})
    with at_rest(inner):
        try:
            expected, *found = (read_outputs(call(inner, Batch(way))) for way in ways)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError):
            return False  # a model that serves no part of its inputs is left as it is called
    found = [_trimmed(output, expected.shape, visible) for output in found]
    if any(output.shape != expected.shape for output in found):
        return False
    scale = float(expected.abs().max()) or 1.0
    plain, *placed = (float((output - expected).abs().max()) / scale for output in found)
    takes = bool(placed) and (placed[0] <= 0.1 * plain or placed[0] <= min(plain + _ROUNDING, _SHIFTED))
    if not takes and not plain <= _SHIFTED:
        warn(
            f"{type(inner).__name__} gives other outputs for rows that are padded on the left than for the same rows without "
            f"padding (by {plain:.2g} of the largest): it counts positions, or finds the token that it pools, as if the padding "
            "were text. Pad on the right.",
            GradregWarning,
        )
    return takes


def _trimmed(output: Tensor, shape: torch.Size, visible: Tensor) -> Tensor:
    """Return the rows of visible tokens of an output, where it has an axis of tokens."""
    if output.dim() != len(shape):
        return output
    for axis, (long, short) in enumerate(zip(output.shape, shape, strict=True)):
        if long != short and long == len(visible):
            return output.index_select(axis, visible.nonzero().squeeze(1))
    return output


def _like(value: object, mask: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == mask.shape
