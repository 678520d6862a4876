"""Contexts that leave a model and the process as they were found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_not

import torch
from torch import nn

from gradreg.model._functional import cloned_buffers, swapped
from gradreg.model._walk import all_modules


@contextmanager
def preserved_random_state(devices: set[torch.device]) -> Iterator[None]:
    """Restore the random streams of the CPU and of the CUDA devices in use on exit.

    Args:
        devices: Devices on which tensors live.

    Yields:
        Nothing.
    """
    cuda = [device for device in devices if device.type == "cuda"]
    before, on_cuda = torch.get_rng_state(), [(device, torch.cuda.get_rng_state(device)) for device in cuda]
    try:
        yield
    finally:  # as `fork_rng`, at a third of its cost
        torch.set_rng_state(before)
        for device, state in on_cuda:
            torch.cuda.set_rng_state(state, device)


@contextmanager
def preserved_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules on exit: counters, caches and whatever else a forward writes to `self`.

    Args:
        model: The module.

    Yields:
        Nothing.
    """
    before = [(vars(module), dict(vars(module))) for module in all_modules(model)]
    try:
        yield
    finally:
        for attributes, saved in before:
            # by identity, for tensors do not compare to a truth value
            if list(attributes) != list(saved) or any(map(is_not, attributes.values(), saved.values())):
                attributes.clear()
                attributes.update(saved)


@contextmanager
def preserved(model: nn.Module, devices: set[torch.device]) -> Iterator[None]:
    """Run forwards without moving buffers, attributes or random streams, also when they raise.

    Args:
        model: The module; its forwards see copies of the buffers.
        devices: Devices on which tensors live.

    Yields:
        Nothing.
    """
    with preserved_random_state(devices), preserved_attributes(model), swapped(model, cloned_buffers(model)):
        yield


def devices_of(model: nn.Module) -> set[torch.device]:
    """Return the devices of parameters and buffers."""
    tables = [table for module in all_modules(model) for table in (module._parameters, module._buffers)]
    return {tensor.device for table in tables for tensor in table.values() if tensor is not None}
