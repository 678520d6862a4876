"""The shape of what a model returns, for drawing random numbers that fit."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gradreg.batch import Batch
from gradreg.engine._observe import observe
from gradreg.engine._points import Points
from gradreg.engine._request import head_count
from gradreg.engine._session import current_session
from gradreg.model import devices_of, preserved, unwrap
from gradreg.scalars import read_outputs


def output_shape(model: nn.Module, batch: Batch, output: str | int | None = None) -> torch.Size:
    """Return the shape of the outputs of one example, of one head: from the shared forward, else from one of one example.

    Args:
        model: Any module.
        batch: The batch.
        output: Which output, where the model returns several.
    """
    inner = unwrap(model)
    session = current_session()
    outputs: Any
    if session is not None and session.might_serve(model, batch, "example", None, True, "auto"):
        outputs = session.outputs
    else:
        with torch.inference_mode(False), torch.no_grad(), preserved(inner, devices_of(inner)):
            outputs = observe(inner, batch[:1], Points()).outputs
    shape = read_outputs(outputs, output).shape
    return shape[1:] if head_count(inner) is None else shape[2:]


# Whether a forward of a model draws random numbers, by its mode
_DRAWS: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()


def draws_random_numbers(model: nn.Module, batch: Batch) -> bool:
    """Whether a forward draws random numbers (dropout), so that two forwards cannot be compared; looked at once per mode.

    Args:
        model: Any module.
        batch: The batch; its first example is run.
    """
    inner = unwrap(model)
    known = _DRAWS.setdefault(inner, {})
    if inner.training not in known:
        devices = devices_of(inner)
        cuda = [device for device in devices if device.type == "cuda"]
        with torch.inference_mode(False), torch.no_grad(), preserved(inner, devices):
            before = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda)]
            observe(inner, batch[:1], Points())
            after = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda)]
        known[inner.training] = not all(map(torch.equal, before, after))
    return known[inner.training]
