"""Route vmap, with the switch that models of transformers need, and a comparison with the loop before that is trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils import _pytree as pytree

from gradreg.batch import Batch
from gradreg.engine._evaluate import evaluate
from gradreg.engine._observe import usable
from gradreg.engine._params import loop_gradients, selected_values
from gradreg.engine._request import Request
from gradreg.engine._scale import scaled, unscaled
from gradreg.errors import GradregError
from gradreg.model import (
    call,
    cloned_buffers,
    devices_of,
    differentiable_kernels,
    looks_at_masks,
    masks_in_full,
    preserved,
    preserved_attributes,
    swapped,
)
from gradreg.scalars import scalar_key

# A vmapped pass holds about this many bytes of per-example gradients at a time, unless chunk_size says otherwise
_CHUNK_BYTES = 256 * 2**20

# What a model that does not run under vmap raises; a genuine fault of the model is raised again by the loop
VMAP_FAULTS = (RuntimeError, NotImplementedError, UserWarning, ValueError, TypeError)

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
        _compare(request)
        _COMPARED.setdefault(request.inner, set()).add(_key(request))
    with masks_in_full():
        return vmap_gradients(request)


def default_chunk(request: Request) -> int:
    """Return how many examples at a time keep a vmapped pass within its share of memory."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in request.params.values())
    return max(1, min(len(request.batch), _CHUNK_BYTES // max(size, 1)))


def vmap_gradients(request: Request) -> dict[str, Tensor]:
    """Return per-example parameter gradients by `vmap` over examples of the pullback of one example.

    Live parameters: a differentiable result carries gradient to all of them. Raises whatever the model raises under vmap.
    """
    batch = _with_input_values(request)
    leaves, structure = pytree.tree_flatten((batch.inputs, batch.targets, batch.groups, dict(batch.extras)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    inner, heads = request.inner, request.heads
    buffers = cloned_buffers(inner)

    def rebuild(rows: Sequence[Tensor]) -> Batch:
        remaining = iter(rows)
        values = [next(remaining).unsqueeze(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inputs, targets, groups, extras = pytree.tree_unflatten(values, structure)
        return Batch(inputs, targets, groups, extras)

    def one(selected: dict[str, Tensor], *rows: Tensor) -> dict[str, Tensor]:
        def scalar(values: dict[str, Tensor]) -> Tensor:
            example = rebuild([row.clone() for row in rows])  # of our own: a first layer may work in place
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            with swapped(inner, {**own, **values}):
                outputs = call(inner, example)
            result = evaluate(request.of, outputs, example, heads)
            return result.sum(1)[0] if request.over_heads else result[0]

        value, pullback = vjp(scalar, selected)[:2]
        gradients: dict[str, Tensor]
        if value.dim() == 0:
            (gradients,) = pullback(scaled(torch.ones_like(value)))
        else:
            basis = torch.eye(value.numel(), dtype=value.dtype, device=value.device).reshape(-1, *value.shape)
            (columns,) = vmap(pullback)(scaled(basis))
            gradients = {name: rows_.reshape(*value.shape, *rows_.shape[1:]) for name, rows_ in columns.items()}
        return {name: unscaled(gradient) for name, gradient in gradients.items()}

    chunk = request.chunk_size or (None if request.differentiable else default_chunk(request))
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(request.differentiable),
        preserved(inner, devices_of(inner)),
        differentiable_kernels(inner, twice=True, written_out=request.differentiable),
    ):
        in_dims = (None, *(0 for _ in tensors))
        result: dict[str, Tensor] = vmap(one, in_dims=in_dims, randomness=request.randomness, chunk_size=chunk)(
            selected_values(request) if request.differentiable else _detached(selected_values(request)), *tensors
        )
    return result


def _compare(request: Request) -> None:
    few = replace(request, batch=_unlike(request.batch), at=request.at_params(), differentiable=False, chunk_size=None)
    with preserved_attributes(request.inner):
        for module in request.inner.modules():
            module.training = False  # dropout cannot be compared
        with masks_in_full():
            vmapped = vmap_gradients(few)
        looped = loop_gradients(few, joint=False)
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
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return batch[:2]
    visible = (mask != 0).flatten(1).sum(1)
    places = [int(visible.argmin()), int(visible.argmax())]
    return batch[places if places[0] != places[1] else [0, 1]]


def _key(request: Request) -> tuple[object, ...]:
    inputs = request.batch.named_inputs().items()
    kinds = tuple((name, getattr(value, "dtype", None), getattr(value, "ndim", None)) for name, value in inputs)
    return (*scalar_key(request.of), request.inner.training, kinds, *request.params)


def _with_input_values(request: Request) -> Batch:
    values: dict[str, Any] = {name: value for name, value in request.at.items() if name in request.points.inputs}
    batch = request.batch.with_inputs(values) if values else request.batch
    batch = usable(batch)
    return batch if request.differentiable else batch.map(lambda tensor: tensor.detach())


def _detached(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}
