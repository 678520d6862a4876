"""Route vmap, with the switch that models of transformers need, and a comparison with the loop before that is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._params import VMAP_FAULTS, loop_gradients, vmap_gradients
from gradreg.engine._request import Request
from gradreg.errors import GradregError
from gradreg.model import looks_at_masks, masks_in_full, preserved_attributes
from gradreg.scalars import scalar_key

# Models, with a scalar and kinds of inputs, whose vmapped gradients with masks in full are those of the loop
_COMPARED: WeakKeyDictionary[nn.Module, set[tuple[object, ...]]] = WeakKeyDictionary()

# Vmapped and looped gradients agree to this share of the largest; models of float64 often compute in float32 inside
_SHARE = {torch.float64: 1e-4, torch.float32: 1e-3}
_HALF_SHARE = 0.1


def vmapped_gradients(request: Request) -> dict[str, Tensor]:
    """Return per-example parameter gradients by vmap.

    A model of transformers that refuses is run again with its masks in full, once that gave the loop's gradients of two
    examples of the batch.

    Raises:
        RuntimeError: Or another one of `VMAP_FAULTS`: what the model raises under vmap, or how the two differ.
    """
    known = _COMPARED.get(request.inner, set())
    if _key(request) not in known:
        try:
            return vmap_gradients(request)
        except GradregError:
            raise
        except VMAP_FAULTS:
            if not looks_at_masks(request.inner):
                raise
    with masks_in_full():
        if _key(request) not in known:
            _compare(request)
            _COMPARED.setdefault(request.inner, set()).add(_key(request))
        return vmap_gradients(request)


def _compare(request: Request) -> None:
    few = replace(request, batch=_unlike(request.batch), at=request.at_params(), differentiable=False, chunk_size=None)
    with preserved_attributes(request.inner):
        for module in request.inner.modules():
            module.training = False  # dropout cannot be compared
        vmapped, looped = vmap_gradients(few), loop_gradients(few, joint=False)
    largest = max(float(value.abs().max()) for value in looped.values())
    for name, value in looped.items():
        gap = float((vmapped[name] - value).abs().max())
        if not gap <= _SHARE.get(value.dtype, _HALF_SHARE) * largest:
            raise RuntimeError(
                f"with masks built in full, vmapped gradients of {name!r} differ from those of the loop by {gap:.3g} (largest "
                f"{largest:.3g})"
            )


def _unlike(batch: Batch) -> Batch:
    """Return the two examples with the fewest and the most visible tokens, the first two where there is no mask."""
    mask = batch.inputs.get("attention_mask") if isinstance(batch.inputs, Mapping) else None
    if not isinstance(mask, Tensor):
        return batch[:2]
    visible = (mask != 0).flatten(1).sum(1)
    places = [int(visible.argmin()), int(visible.argmax())]
    return batch[places if places[0] != places[1] else [0, 1]]


def _key(request: Request) -> tuple[object, ...]:
    inputs = request.batch.named_inputs().items()
    kinds = tuple((name, getattr(value, "dtype", None), getattr(value, "ndim", None)) for name, value in inputs)
    return (*scalar_key(request.of), request.inner.training, kinds, *request.params)
