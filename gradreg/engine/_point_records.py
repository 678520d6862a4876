"""Points and the gradients there from one forward: attention weights beside what a scalar makes of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._checks import check_batch_axes, check_independent
from gradreg.engine._observe import Capture, grad_mode, observe
from gradreg.engine._params import check_alone
from gradreg.engine._pull import pull_with_values
from gradreg.engine._request import Request, resolve
from gradreg.errors import GradregError
from gradreg.model import (
    cloned_buffers,
    devices_of,
    preserved_attributes,
    preserved_random_state,
    swapped,
    train_mode_batch_norms,
)
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Wrt

T = TypeVar("T")


@dataclass(frozen=True)
class PointRecord:
    """What one forward showed.

    Attributes:
        rows: Which examples of the batch.
        batch: These examples, as the model was given them.
        scalars: `[n, *targets]`.
        points: From key to the value that the point had, `[n, *shape]`.
        gradients: From key to the gradient there, `[n, *targets, *shape]`.
    """

    rows: slice
    batch: Batch
    scalars: Tensor
    points: dict[str, Tensor]
    gradients: dict[str, Tensor]


def point_records(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    reduce: Callable[[PointRecord], T],
    *,
    per: str = "example",
    differentiable: bool = False,
    chunk_size: int | None = None,
) -> list[T]:
    r"""Show activations or attention maps and the gradients there to `reduce`, a chunk at a time; the model is left as it was.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: As in `gradients`.
        wrt: `Activations`, `Embeddings`, `AttentionMaps`, or a tuple of them.
        reduce: Called with every chunk's record; what is large lives no longer than its call.
        per: `"example"`: every example's own scalars. `"batch"`: their sum over the batch, $\partial \sum_j \mathrm{of}_j /
            \partial\,\mathrm{point}_i$; examples may then depend on each other, as in a contrastive loss.
        differentiable: Keep the graph.
        chunk_size: Examples at a time; None for all at once.

    Returns:
        What `reduce` returned, in the order of the examples.

    Raises:
        CoupledExamplesError: If scalars mix examples and `per` is `"example"`.
        GradregError: If options do not go together.
    """
    if per not in ("example", "batch"):
        raise GradregError(f"per={per!r}; allowed are 'example' and 'batch'.")
    request = resolve(model, batch, of, wrt, differentiable=differentiable, chunk_size=chunk_size)
    if per == "batch" and chunk_size is not None and chunk_size < len(request.batch):
        raise GradregError('per="batch" needs all examples at once; leave chunk_size out.')
    if request.params or request.points.outputs or request.points.features or request.points.inputs:
        raise GradregError(f"wrt={wrt!r}; allowed are Activations, Embeddings and AttentionMaps.")
    size = request.chunk_size or len(request.batch)
    if train_mode_batch_norms(request.inner):
        size = len(request.batch)
    elif size < len(request.batch):
        check_alone(request)
    found = []
    with preserved_random_state(devices_of(request.inner)):  # around all chunks: each draws numbers of its own
        for start in range(0, len(request.batch), size):
            rows = slice(start, min(start + size, len(request.batch)))
            part = request.batch if size >= len(request.batch) else request.batch[rows]
            found.append(_shown(request, part, rows, reduce))
    if per == "example":
        check_independent(request.inner, request.batch, request.of, request.points, request.heads, {})
    return found


def _shown(request: Request, batch: Batch, rows: slice, reduce: Callable[[PointRecord], T]) -> T:
    inner, keep = request.inner, request.differentiable
    with grad_mode(), preserved_attributes(inner), swapped(inner, cloned_buffers(inner)):
        capture = observe(request.model, batch, request.points, differentiable=keep)
        check_batch_axes(inner, batch, capture, request.points)
        scalars, gradients = pull_with_values(
            inner, capture, request.of, request.points, request.heads, differentiable=keep
        )
        points = _values(capture)
        if not keep:
            scalars = scalars.detach()
            points = {key: value.detach() for key, value in points.items()}
            gradients = {key: value.detach() for key, value in gradients.items()}
        mode: AbstractContextManager[Any] = nullcontext() if keep else torch.no_grad()
        with mode:
            return reduce(PointRecord(rows, capture.batch, scalars, points, gradients))


def _values(capture: Capture) -> dict[str, Tensor]:
    return {key: recorded.tensor.movedim(recorded.batch_axis, 0) for key, recorded in capture.activations.items()}
