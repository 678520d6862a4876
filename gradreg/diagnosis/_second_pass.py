"""Activations as they are, with a smooth second derivative that stands in for the missing one."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.diagnosis._activations import Activation, per_channel
from gradreg.diagnosis._softplus import bend


def with_second_derivative(row: Activation, x: Tensor, beta: float, settings: dict[str, Any]) -> Tensor:
    r"""Return the activation, bit by bit, plus a term whose value and slope are 0 and whose second derivative is not.

    Where the slope jumps by $J$ at $t$, the second derivative is $J \beta \sigma(\beta (x - t)) \sigma(\beta (t - x))$, that of
    the softplus in place of the hinge. Values and first derivatives are exactly those of the activation.
    """
    assert row.bends is not None
    result = _exact(row, x, settings)
    for place, jump in row.bends(**settings):
        if isinstance(jump, Tensor):
            jump = per_channel(x, jump)
        nothing = bend(x - place if place else x, beta)
        result = result + (nothing if isinstance(jump, float) and jump == 1 else nothing * jump)
    return result


_EXACT: ContextVar[bool] = ContextVar("gradreg_exact_activation", default=False)


def is_exact() -> bool:
    """Whether the activation itself is being computed, which is not to be replaced."""
    return _EXACT.get()


def _exact(row: Activation, x: Tensor, settings: dict[str, Any]) -> Tensor:
    token = _EXACT.set(True)
    try:
        if row.module is nn.Hardsigmoid:
            return F.relu6(x + 3) / 6  # the same function; the kernel of torch raises in the second pass
        result: Tensor = row.functions[0](x, **settings)
        return result
    finally:
        _EXACT.reset(token)
