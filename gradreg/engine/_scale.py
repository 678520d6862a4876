"""A scale for inner gradients, so that low precision does not round them to zero on their way back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from gradreg.errors import GradregError

_SCALE: ContextVar[float] = ContextVar("gradreg_inner_scale", default=1.0)


@contextmanager
def inner_scale(scale: float) -> Iterator[None]:
    r"""Pull the gradients of `gradients`, and so of penalties, back multiplied by a scale and divide again: the same gradients.

    In float16 what is below 6e-8 becomes zero, which gradients of single examples often are. `GradScaler` does not help there:
    it scales the loss, so the *outer* backward, while penalties are built of *inner* gradients. The two compose: gradreg never
    takes inner gradients of the scaled loss, so the penalty is right whatever the scaler's scale is.

    Results of low precision come as float32, because dividing in float16 would lose them again. bfloat16 has the range of
    float32 and needs no scale.

    Args:
        scale: A positive number, best a power of two. Where logits are float16 their own gradient is the scale, which must
            stay below 65504.

    Yields:
        Nothing.

    Raises:
        GradregError: If the scale is not positive and finite.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> import gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> objective = gr.Objective(F.cross_entropy, smooth=gr.regularizers.InputGradient())
        >>> scaler = torch.amp.GradScaler("cpu")
        >>> with torch.autocast("cpu", dtype=torch.float16), gr.inner_scale(2.0**12):
        ...     loss, logs = objective(net, (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])))
        >>> scaler.scale(loss).backward()
    """
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale <= 0:
        raise GradregError(f"inner_scale({scale!r}); it must be a positive, finite number.")
    token = _SCALE.set(float(scale))
    try:
        yield
    finally:
        _SCALE.reset(token)


def is_scaled() -> bool:
    """Whether inner gradients are scaled here."""
    return _SCALE.get() != 1.0


def scaled(scalar: Tensor) -> Tensor:
    """Return the scalars to pull back."""
    return scalar * _SCALE.get() if is_scaled() else scalar


def unscaled(gradient: Tensor) -> Tensor:
    """Return the gradient of what `scaled` was given."""
    if not is_scaled():
        return gradient
    if gradient.dtype in (torch.float16, torch.bfloat16):
        gradient = gradient.float()
    return gradient / _SCALE.get()
