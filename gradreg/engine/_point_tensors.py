"""The values that points have in a plain forward: where a path ends, and what a mean or a replacement is taken from."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.engine._checks import check_batch_axes
from gradreg.engine._observe import Capture, grad_mode, observe
from gradreg.engine._points import Points
from gradreg.engine._request import resolve
from gradreg.errors import GradregError
from gradreg.model import devices_of, preserved
from gradreg.scalars import all_logits
from gradreg.wrt import Wrt


@dataclass(frozen=True)
class PointTensor:
    """A point as it is in a forward.

    Attributes:
        value: `[n, *shape]`, the example first.
        source: What the module was given, where that is one tensor: the token ids of an embedding.
    """

    value: Tensor
    source: Tensor | None = None


def point_tensors(
    model: nn.Module, batch: Any, wrt: Wrt | tuple[Wrt, ...], *, differentiable: bool = False
) -> dict[str, PointTensor]:
    """Return the values of inputs, features and activations in one forward; the model is left as it was.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        wrt: As in `gradients`; without parameters and outputs.
        differentiable: Keep the graph to parameters, and to inputs that require grad.

    Returns:
        From result key to the point.
    """
    request = resolve(model, batch, all_logits(), wrt, differentiable=differentiable)
    if request.params or request.points.outputs:
        raise GradregError("Params() and Outputs() are no points on the way through the model.")
    inner = request.inner
    graph = grad_mode() if differentiable else nullcontext()
    with graph, torch.set_grad_enabled(differentiable), preserved(inner, devices_of(inner)):
        capture = observe(request.model, request.batch, request.points, differentiable=differentiable)
        check_batch_axes(inner, request.batch, capture, request.points)
    found = _found(capture, request.points)
    if differentiable:
        return found
    return {key: PointTensor(point.value.detach(), point.source) for key, point in found.items()}


def _found(capture: Capture, points: Points) -> dict[str, PointTensor]:
    found = {name: PointTensor(value) for name, value in capture.inputs.items()}
    if points.features:
        found["features"] = PointTensor(capture.sources["features"])
    for key, recorded in capture.activations.items():
        found[key] = PointTensor(recorded.tensor.movedim(recorded.batch_axis, 0), recorded.source)
    return found
