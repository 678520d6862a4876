"""LayerNorm, InstanceNorm and weight normalization written out, where the kernels of torch give wrong second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class WrittenOutNorms(TorchFunctionMode):
    """Compute layer, instance and weight normalization from means and variances inside the context.

    Their kernels treat the saved mean and deviation as constants in the third derivative, and under `vmap(grad(...))` already in
    the second, so that what is differentiated again is wrong without any error (measured with torch 2.13; pytorch/pytorch#175754;
    not so GroupNorm, RMSNorm or eval BatchNorm). That of weight normalization gives wrong second derivatives with respect to the
    direction `v` (torch 2.13: `gradgradcheck` fails). Written out, every order is right. Low precision is computed in float32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer calls of layer and instance normalization; pass all others on."""
        if func not in _NORMS:
            return func(*args, **kwargs) if kwargs else func(*args)
        self.used = True
        kwargs = kwargs or {}
        if func in (torch.layer_norm, F.layer_norm):
            return _layer_norm(*args, **kwargs)
        if func is torch.native_layer_norm:
            input, shape, weight, bias, eps = args
            axes = list(range(-len(shape), 0))
            centered = input - input.mean(axes, keepdim=True)
            scale = (centered.square().mean(axes, keepdim=True) + eps).rsqrt()
            return _layer_norm(input, shape, weight, bias, eps), input.mean(axes, keepdim=True), scale
        if func is torch._weight_norm:
            return _weight_norm(*args, **kwargs)
        if func in (torch.instance_norm, F.instance_norm) and _from_input(func, args, kwargs):
            return _instance_norm(func, args, kwargs)
        return func(*args, **kwargs)


_NORMS = frozenset(
    (
        torch.layer_norm,
        F.layer_norm,
        torch.native_layer_norm,
        torch.instance_norm,
        F.instance_norm,
        torch._weight_norm,
    )
)


@contextmanager
def written_out_norms(model: nn.Module, size: int) -> Iterator[None]:
    """Enter `WrittenOutNorms` for a model that needs it.

    The first forward of a model tells whether it normalizes so at all, also by functions; others then go without the mode,
    which costs a call of Python per operation. A model that has grown, or changed its mode, is asked again.

    Args:
        model: The module whose forward runs inside.
        size: The number of its modules.

    Yields:
        Nothing.
    """
    known = (size, model.training)
    if _WITHOUT.get(model) == known:
        yield
        return
    mode = WrittenOutNorms()
    with mode:
        yield
    if not mode.used:
        _WITHOUT[model] = known


_WITHOUT: WeakKeyDictionary[nn.Module, tuple[int, bool]] = WeakKeyDictionary()


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _affine(_normalized(input, list(range(-len(normalized_shape), 0)), eps), weight, bias)


def _instance_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = _named(func, args, kwargs)
    input = given["input"]
    shape = (1, -1, *[1] * (input.dim() - 2))
    weight, bias = (given[name].reshape(shape) if given[name] is not None else None for name in ("weight", "bias"))
    if given.get("running_mean") is not None:
        _move_statistics(input, given["running_mean"], given["running_var"], given["momentum"])
    return _affine(_normalized(input, list(range(2, input.dim())), given["eps"]), weight, bias)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    precise = v.float() if v.dtype in (torch.float16, torch.bfloat16) else v
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()] if dim != -1 else None
    norm = torch.linalg.vector_norm(precise, dim=axes, keepdim=axes is not None)
    weight: Tensor = (precise * (g / norm)).to(v.dtype)
    return weight


def _named(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    if func is torch.instance_norm:
        names = ("input", "weight", "bias", "running_mean", "running_var", "use_input_stats", "momentum", "eps")
    defaults = {"weight": None, "bias": None, "use_input_stats": True, "momentum": 0.1, "eps": 1e-5}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _from_input(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether statistics come from the input; with running ones the kernel is right."""
    return bool(_named(func, args, kwargs)["use_input_stats"])


def _move_statistics(input: Tensor, mean: Tensor, variance: Tensor | None, momentum: float) -> None:
    """Move running statistics towards those of the instances, averaged over examples, as the kernel does."""
    with torch.no_grad():
        instances = input.detach().to(mean.dtype).flatten(2)
        mean.lerp_(instances.mean(2).mean(0), momentum)
        if variance is not None:
            variance.lerp_(instances.var(2).mean(0), momentum)


def _normalized(input: Tensor, axes: list[int], eps: float) -> Tensor:
    precise = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    centered = precise - precise.mean(axes, keepdim=True)
    return (centered * (centered.square().mean(axes, keepdim=True) + eps).rsqrt()).to(input.dtype)


def _affine(normalized: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = normalized if weight is None else normalized * weight
    return scaled if bias is None else scaled + bias
