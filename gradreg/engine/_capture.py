"""Route capture: one recorded forward, and one pullback per target."""

from __future__ import annotations

import torch
from torch import Tensor

from gradreg.batch import Batch
from gradreg.engine._checks import check_batch_axes, check_independent
from gradreg.engine._evaluate import check_targets
from gradreg.engine._observe import grad_mode, observe
from gradreg.engine._params import check_alone
from gradreg.engine._pull import pull
from gradreg.engine._request import Request
from gradreg.model import (
    cloned_buffers,
    devices_of,
    preserved_attributes,
    preserved_random_state,
    swapped,
    train_mode_batch_norms,
)


def capture_gradients(request: Request) -> dict[str, Tensor]:
    """Return per-example gradients at the points of a request, from a forward of its own without side effects."""
    size = request.chunk_size or len(request.batch)
    if train_mode_batch_norms(request.inner):
        size = len(request.batch)  # statistics before wrt are those of the whole batch
    elif size < len(request.batch):
        check_alone(request)
    parts = []
    with preserved_random_state(devices_of(request.inner)):  # around all chunks: each draws numbers of its own
        for start in range(0, len(request.batch), size):
            at = {name: value[start : start + size] for name, value in request.at_points().items()}
            whole = size >= len(request.batch)
            parts.append(_captured(request, request.batch if whole else request.batch[start : start + size], at))
    check_independent(request.inner, request.batch, request.of, request.points, request.heads, request.at_points())
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _captured(request: Request, batch: Batch, at: dict[str, Tensor]) -> dict[str, Tensor]:
    with (
        grad_mode(),  # first: buffers copied under inference_mode could not be saved for a backward
        preserved_attributes(request.inner),
        swapped(request.inner, {**cloned_buffers(request.inner), **request.at_params()}),
    ):
        capture = observe(
            request.model, batch, request.points, at=at, differentiable=request.differentiable, fuse=request.of
        )
        if capture.fused is not None:
            check_targets(request.of, capture.outputs, capture.batch)
            return {"features": capture.fused[1]}
        check_batch_axes(request.inner, batch, capture, request.points)
        return pull(
            request.inner, capture, request.of, request.points, request.heads, differentiable=request.differentiable
        )
