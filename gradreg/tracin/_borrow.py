"""A model on loan: other weights, eval mode, and everything as before at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradreg.errors import CoupledExamplesError
from gradreg.model import devices_of, preserved, swapped, train_mode_batch_norms, unwrap

__all__ = ["borrowed"]


@contextmanager
def borrowed(model: nn.Module) -> Iterator[nn.Module]:
    """Lend the model with copies of its parameters and buffers, in eval mode.

    The originals are never written to: parameters, buffers, `.grad`, train flags, attributes and random streams are as before
    when the context ends, however it ends.

    Args:
        model: Any module; wrappers of DistributedDataParallel are taken off.

    Yields:
        The model, into which weights can be loaded.

    Raises:
        CoupledExamplesError: If a BatchNorm has no running statistics and so mixes examples even in eval mode.
    """
    inner = unwrap(model)
    with torch.inference_mode(False), preserved(inner, devices_of(inner)):
        copies: dict[str, Tensor] = {
            name: nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            for name, parameter in inner.named_parameters()
        }
        with swapped(inner, copies):
            inner.eval()
            mixing = train_mode_batch_norms(inner)
            if mixing:
                raise CoupledExamplesError(
                    f"Module {mixing[0]!r} normalizes over the batch also in eval mode (it has no running statistics), so an "
                    "example's gradient depends on its neighbors. Use track_running_stats=True, or another normalization."
                )
            yield inner
