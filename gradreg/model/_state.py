"""Contexts that leave a model and the process as they were found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gradreg.model._functional import cloned_buffers, swapped


@contextmanager
def preserved_random_state(devices: set[torch.device]) -> Iterator[None]:
    """Restore the random streams of the CPU and of the CUDA devices in use on exit.

    Args:
        devices: Devices on which tensors live.

    Yields:
        Nothing.
    """
    cuda = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda, enabled=True):
        yield


@contextmanager
def preserved(model: nn.Module, devices: set[torch.device]) -> Iterator[None]:
    """Run forwards without moving buffers or random streams, also when they raise.

    Args:
        model: The module; its forwards see copies of the buffers.
        devices: Devices on which tensors live.

    Yields:
        Nothing.
    """
    with preserved_random_state(devices), swapped(model, cloned_buffers(model)):
        yield


def devices_of(model: nn.Module) -> set[torch.device]:
    """Return the devices of parameters and buffers."""
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}
