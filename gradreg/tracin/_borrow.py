"""A model on loan: other weights, eval mode, and everything as before at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradreg.errors import CoupledExamplesError
from gradreg.model import devices_of, preserved, swapped, train_mode_batch_norms, unwrap

__all__ = ["borrowed", "plain_module"]


def plain_module(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers of DistributedDataParallel, DataParallel and torch.compile: it has the plain names."""
    inner = unwrap(model)
    while type(inner).__name__ == "OptimizedModule" and isinstance(getattr(inner, "_orig_mod", None), nn.Module):
        inner = unwrap(inner._orig_mod)  # type: ignore[arg-type]  # a module, as was just seen
    return inner


@contextmanager
def borrowed(model: nn.Module) -> Iterator[nn.Module]:
    """Lend the model with copies of its parameters and buffers, in eval mode.

    The originals are never written to: parameters, buffers, `.grad`, train flags, attributes and random streams are as before
    when the context ends, however it ends.

    Args:
        model: A module without wrappers.

    Yields:
        The model, into which weights can be loaded.

    Raises:
        CoupledExamplesError: If a BatchNorm has no running statistics and so mixes examples even in eval mode.
    """
    with torch.inference_mode(False), preserved(model, devices_of(model)):
        copies: dict[str, Tensor] = {
            name: nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        with swapped(model, copies):
            model.eval()
            mixing = train_mode_batch_norms(model)
            if mixing:
                raise CoupledExamplesError(
                    f"Module {mixing[0]!r} normalizes over the batch also in eval mode (it has no running statistics), so an "
                    "example's gradient depends on its neighbors. Use track_running_stats=True, or another normalization."
                )
            yield model
