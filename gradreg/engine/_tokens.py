"""Batches of tokens: which embedding reads them, and the positions of left-padded rows; found by measurement, once a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradreg.batch import Batch, substituted
from gradreg.errors import BatchError
from gradreg.model import call, devices_of, differentiable_kernels, input_embeddings, preserved, walk
from gradreg.scalars import read_outputs

_FIRINGS: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()

# Whether position_ids from the mask make left-padded rows what they are unpadded
_TAKES_POSITIONS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def token_embeddings(inner: nn.Module, batch: Batch) -> dict[str, int]:
    """Return the embeddings that read the inputs, with their calls a forward.

    Where the module that a model names as its own shares its weight with others, those that a forward on two examples calls
    are taken: models of which only the encoder is in use name one that is never called.
    """
    known = _FIRINGS.get(inner)
    if known is not None:
        return known
    firings = input_embeddings(inner)
    named = dict(walk(inner))
    weights = {id(getattr(named[name], "weight", None)) for name in firings}
    siblings = {
        name: module
        for name, module in named.items()
        if isinstance(module, nn.Embedding) and id(module.weight) in weights
    }
    if not siblings.keys() <= firings.keys():
        calls = _calls(inner, batch[:2], {**siblings, **{name: named[name] for name in firings}})
        if not all(calls[name] for name in firings) and any(calls.values()):
            firings = {name: count for name, count in calls.items() if count}
    _FIRINGS[inner] = firings
    return firings


def _calls(inner: nn.Module, batch: Batch, modules: Mapping[str, nn.Module]) -> dict[str, int]:
    calls = dict.fromkeys(modules, 0)

    def counting(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            calls[name] += 1

        return hook

    handles = [module.register_forward_hook(counting(name)) for name, module in modules.items()]
    try:
        with torch.inference_mode(False), torch.no_grad(), preserved(inner, devices_of(inner)):
            call(inner, batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def prepared(inner: nn.Module, batch: Batch) -> Batch:
    """Return a batch of tokens as the model needs it: rows that are padded on the left get their `position_ids`.

    Without them a model with learned positions reads shifted ones. They are given where a measurement on one row shows that
    they make the row what it is without padding.

    Raises:
        BatchError: If the attention mask hides all tokens of an example: such an example has no defined output.
    """
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
    if not bool(left.any()) or not _may_take_positions(inner, batch):
        return batch
    if inner not in _TAKES_POSITIONS:
        row = int(left.nonzero()[0])
        _TAKES_POSITIONS[inner] = _positions_help(inner, batch[row : row + 1])
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
    return mask


def _may_take_positions(inner: nn.Module, batch: Batch) -> bool:
    return (
        "position_ids" not in batch.input_names
        and "input_ids" in batch.input_names
        and "position_ids" in inspect.signature(inner.forward).parameters
    )


def _positions_help(inner: nn.Module, row: Batch) -> bool:
    """Whether a left-padded row with positions from its mask is nearer to the row without padding than without them."""
    mask = row.inputs["attention_mask"]
    visible = mask[0] != 0
    named = row.named_inputs()
    trimmed = Batch({name: value[:, visible] if _like(value, mask) else value for name, value in named.items()})
    given = Batch({**named, "position_ids": positions(mask)})
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        preserved(inner, devices_of(inner)),
        differentiable_kernels(inner, twice=False),
    ):
        for module in inner.modules():
            module.training = False
        try:
            expected, plain, placed = (read_outputs(call(inner, each)) for each in (trimmed, Batch(named), given))
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError):
            return False  # a model that serves no part of its inputs is left as it is called
    if plain.shape != expected.shape and plain.dim() > 2 and plain.shape[1] == len(visible):
        plain, placed = plain[:, visible], placed[:, visible]
    if plain.shape != expected.shape:
        return False
    gap, remaining = float((plain - expected).abs().max()), float((placed - expected).abs().max())
    return remaining < 0.1 * gap and gap > 1e-4 * float(expected.abs().max())


def _like(value: object, mask: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == mask.shape
