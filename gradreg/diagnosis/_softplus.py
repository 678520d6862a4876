"""The softplus with all of its second derivative, and the bend: a softplus of which only the second derivative is left."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def softplus(x: Tensor, beta: float) -> Tensor:
    r"""Return $\log(1 + e^{\beta x}) / \beta$ with all of its second derivative, $\beta \sigma(\beta x) \sigma(-\beta x)$.

    `torch.nn.Softplus` is linear above `threshold / beta`, where its second derivative is exactly 0. Without a threshold,
    rounding makes it 0 above `17 / beta` in float32, since there $1 - \sigma = 0$. Here it is not, until it underflows.
    """
    result: Tensor = _Softplus.apply(x, beta, True)
    return result


def bend(x: Tensor, beta: float) -> Tensor:
    """Return 0, with the slope 0, and with the second derivative of the softplus."""
    result: Tensor = _Softplus.apply(x, beta, False)
    return result


class _Softplus(torch.autograd.Function):
    """The softplus, or nothing, with the slope of `_Sigmoid`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, beta: float, shown: bool) -> Tensor:
        return F.logsigmoid(-beta * x) / -beta if shown else torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, bool], output: Tensor) -> None:
        x, ctx.beta, ctx.shown = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        return cotangent * _Sigmoid.apply(*ctx.saved_tensors, ctx.beta, ctx.shown), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        result: Tensor = tangent * _Sigmoid.apply(*ctx.saved_tensors, ctx.beta, ctx.shown)
        return result


class _Sigmoid(torch.autograd.Function):
    """The sigmoid, or nothing, with the slope of the sigmoid."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, beta: float, shown: bool) -> Tensor:
        return torch.sigmoid(beta * x) if shown else torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, bool], output: Tensor) -> None:
        x, ctx.beta, _ = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        return cotangent * _curvature(ctx.saved_tensors[0], ctx.beta), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return tangent * _curvature(ctx.saved_tensors[0], ctx.beta)


def _curvature(x: Tensor, beta: float) -> Tensor:
    return beta * torch.sigmoid(beta * x) * torch.sigmoid(-beta * x)


for _forward in (_Softplus.forward, _Sigmoid.forward):
    # torch asks for the signature at every call of such a function
    vars(_forward)["__signature__"] = inspect.signature(_forward)
