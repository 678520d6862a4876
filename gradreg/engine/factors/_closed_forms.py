"""Closed forms: from the input of a layer and the gradient at its output to its per-example parameter gradients."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.engine.factors._pieces import Dense, Piece, outer

# From the module, its input and the gradient at its output, both `[n, ...]`, to pieces by attribute
Form: TypeAlias = Callable[[Any, Tensor, Tensor], dict[str, Piece]]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

# Layers whose second axis is that of channels: their closed forms want the examples on the first
CHANNELS_SECOND = (*_CONVOLUTIONS, *_TRANSPOSED, *_BATCH_NORMS, *_INSTANCE_NORMS, nn.GroupNorm)


def closed_form(module: nn.Module) -> tuple[str, Form] | None:
    """Return the name and the closed form of a module, or None where it has none.

    Subclasses do not count: their forward may do anything.
    """
    kind = type(module)
    if "forward" in vars(module) or not _plain_weights(module):
        return None
    if kind in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "linear", _linear
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return "transposed linear", _transposed_linear
    if kind is nn.Embedding and isinstance(module, nn.Embedding):
        return ("embedding", _embedding) if module.max_norm is None and not module.scale_grad_by_freq else None
    if kind in _CONVOLUTIONS:
        return "convolution", _convolution
    if kind in _TRANSPOSED:
        return "transposed convolution", _transposed_convolution
    if kind is nn.LayerNorm:
        return "layer norm", _layer_norm
    if kind is nn.RMSNorm:
        return "RMS norm", _rms_norm
    if kind is nn.GroupNorm:
        return "group norm", _group_norm
    if kind in _BATCH_NORMS and not module.training and getattr(module, "running_mean", None) is not None:
        return "batch norm", _batch_norm
    if kind in _INSTANCE_NORMS and not module.training and not getattr(module, "track_running_stats", True):
        return "instance norm", _instance_norm
    return None


def _plain_weights(module: nn.Module) -> bool:
    """Whether the module holds its weight and bias as ordinary parameters: not so under the old weight_norm."""
    return set(module._parameters) <= {"weight", "bias"} and module._parameters.get("weight") is not None


def _positions(x: Tensor) -> Tensor:
    """View `[n, ..., d]` as `[n, T, d]`."""
    return x.reshape(len(x), -1, x.shape[-1])


def _bias(d: Tensor) -> Dense:
    """Sum a gradient `[n, T, q]` over positions; for one position a view, so that products are shared with the weight."""
    return Dense(d[:, 0] if d.shape[1] == 1 else d.sum(1))


def _linear(module: nn.Linear, x: Tensor, d: Tensor) -> dict[str, Piece]:
    x, d = _positions(x), _positions(d)
    return {"weight": outer(d, x, d, module.weight.shape), "bias": _bias(d)}


def _transposed_linear(module: Any, x: Tensor, d: Tensor) -> dict[str, Piece]:
    x, d = _positions(x), _positions(d)
    return {"weight": outer(x, d, d, module.weight.shape), "bias": _bias(d)}


def _embedding(module: nn.Embedding, ids: Tensor, d: Tensor) -> dict[str, Piece]:
    ids, d = ids.reshape(len(ids), -1), _positions(d)
    if module.padding_idx is not None:
        d = d * (ids != module.padding_idx).unsqueeze(2)
    return {"weight": outer(ids, d, d, module.weight.shape)}


def _windows(x: Tensor, kernel: tuple[int, ...], stride: Any, dilation: Any, count: tuple[int, ...]) -> Tensor:
    """View the windows of `[n, c, *space]` as `[n, c, *kernel, *count]`."""
    steps = x.stride()[2:]
    inside = [step * by for step, by in zip(steps, dilation, strict=True)]
    between = [step * by for step, by in zip(steps, stride, strict=True)]
    return x.as_strided((*x.shape[:2], *kernel, *count), (*x.stride()[:2], *inside, *between), x.storage_offset())


def _grouped(left: Tensor, right: Tensor, gradient: Tensor, groups: int, shape: torch.Size) -> Piece:
    """Return the piece of channels `[n, q, L]` and windows `[n, p, L]`; groups are written out, for they are small."""
    if groups == 1:
        return outer(left.transpose(1, 2), right.transpose(1, 2), gradient.transpose(1, 2), shape)
    n, positions = left.shape[0], left.shape[2]
    lefts = left.reshape(n * groups, -1, positions)
    written = torch.bmm(lefts, right.reshape(n * groups, -1, positions).transpose(1, 2))
    return Dense(written.reshape(n, *shape))


def _convolution(module: nn.Conv2d, x: Tensor, d: Tensor) -> dict[str, Piece]:
    pads = module._reversed_padding_repeated_twice
    if any(pads):
        x = F.pad(x, pads) if module.padding_mode == "zeros" else F.pad(x, pads, mode=module.padding_mode)
    count = tuple(d.shape[2:])
    windows = _windows(x.contiguous(), module.kernel_size, module.stride, module.dilation, count)
    windows = windows.reshape(len(x), -1, prod(count))
    d = d.flatten(2)
    return {"weight": _grouped(d, windows, d, module.groups, module.weight.shape), "bias": Dense(d.sum(2))}


def _transposed_convolution(module: nn.ConvTranspose2d, x: Tensor, d: Tensor) -> dict[str, Piece]:
    bias = Dense(d.flatten(2).sum(2))
    padding: tuple[int, ...] = module.padding  # type: ignore[assignment]  # torch keeps a tuple here
    if any(padding):
        d = F.pad(d, [width for width in reversed(padding) for _ in range(2)])
    count = tuple(x.shape[2:])
    windows = _windows(d.contiguous(), module.kernel_size, module.stride, module.dilation, count)
    windows = windows.reshape(len(x), -1, prod(count))
    return {"weight": _grouped(x.flatten(2), windows, windows, module.groups, module.weight.shape), "bias": bias}


def _scaled(module: Any, normalized: Tensor, d: Tensor, kept: tuple[int, ...]) -> dict[str, Piece]:
    """Return the gradients of a scale and a shift: sums over all axes but the example's and the kept ones."""
    summed = [axis for axis in range(1, d.dim()) if axis not in kept]
    scale = d * normalized
    return {
        "weight": Dense(scale.sum(summed) if summed else scale),
        "bias": Dense(d.sum(summed) if summed else d),
    }


def _layer_norm(module: nn.LayerNorm, x: Tensor, d: Tensor) -> dict[str, Piece]:
    kept = tuple(range(x.dim() - len(module.normalized_shape), x.dim()))
    return _scaled(module, F.layer_norm(x, module.normalized_shape, eps=module.eps), d, kept)


def _rms_norm(module: nn.RMSNorm, x: Tensor, d: Tensor) -> dict[str, Piece]:
    kept = tuple(range(x.dim() - len(module.normalized_shape), x.dim()))
    return _scaled(module, F.rms_norm(x, module.normalized_shape, eps=module.eps), d, kept)


def _group_norm(module: nn.GroupNorm, x: Tensor, d: Tensor) -> dict[str, Piece]:
    return _scaled(module, F.group_norm(x, module.num_groups, eps=module.eps), d, (1,))


def _batch_norm(module: nn.BatchNorm1d, x: Tensor, d: Tensor) -> dict[str, Piece]:
    normalized = F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)
    return _scaled(module, normalized, d, (1,))


def _instance_norm(module: nn.InstanceNorm1d, x: Tensor, d: Tensor) -> dict[str, Piece]:
    return _scaled(module, F.instance_norm(x, eps=module.eps), d, (1,))
