"""Sums of products in full precision, whatever surrounds the call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def precise(tensor: Tensor) -> Tensor:
    """Return float16 and bfloat16 as float32, all else as it is.

    A square in float16 overflows from 256 on and vanishes below 2.4e-4, which gradients often are.
    """
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def full_precision(tensor: Tensor) -> AbstractContextManager[None]:
    """Leave autocast, whose products would be of low precision again."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
