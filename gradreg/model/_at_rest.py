"""A model for a look at what it does: in eval mode, without gradients, and left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gradreg.model._kernels import differentiable_kernels
from gradreg.model._state import devices_of, preserved
from gradreg.model._walk import all_modules

__all__ = ["at_rest"]


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Run forwards inside that show how a model works; they draw no numbers and write nothing that stays.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        preserved(model, devices_of(model)),
        differentiable_kernels(model, twice=False),
    ):
        for module in all_modules(model):
            module.training = False  # dropout would differ; `preserved` puts the flags back
        yield
