"""The scalars themselves at other points: finite differences need values, not gradients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from gradreg.batch import Batch, substituted
from gradreg.engine._checks import check_batch_axes, check_independent
from gradreg.engine._evaluate import check_targets, evaluate
from gradreg.engine._observe import grad_mode, observe
from gradreg.engine._pull import pull_with_values
from gradreg.engine._request import resolve
from gradreg.engine._session import current_session
from gradreg.model import devices_of, preserved, swapped
from gradreg.scalars import ScalarFunction, bind
from gradreg.wrt import Wrt


def point_values(
    model: nn.Module,
    batch: Batch,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    *,
    at: Mapping[str, Tensor] | None = None,
    differentiable: bool = True,
) -> Tensor:
    """Return the scalars at given values of inputs, features, activations or parameters; the model is left as it was.

    Without `at`, a session answers from its shared forward.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: As in `gradients`.
        wrt: What `at` replaces.
        at: The values.
        differentiable: Keep the graph, to live parameters and to values that require grad.

    Returns:
        `[n, *targets]`, with heads `[n, K, *targets]`.
    """
    session = current_session()
    if not at and session is not None and session.might_serve(model, batch, "example", at, True, "auto"):
        capture, heads, of = session.capture, session.heads, bind(of, session.inner)
        values = evaluate(of, capture.outputs, substituted(batch, capture.batch.named_inputs()), heads)
        return values if differentiable else values.detach()
    request = resolve(model, batch, of, wrt, at=at, differentiable=differentiable)
    graph = grad_mode() if differentiable else nullcontext()
    params = request.at_params()
    with graph, torch.set_grad_enabled(differentiable), preserved(request.inner, devices_of(request.inner)):
        with swapped(request.inner, params):
            capture = observe(
                request.inner if params else request.model,
                request.batch,
                request.points.only(request.at),
                at=request.at_points(),
                differentiable=differentiable,
                copies=False,
            )
        check_targets(request.of, capture.outputs, capture.batch)
        return evaluate(request.of, capture.outputs, capture.batch, request.heads)


def values_and_gradients(
    model: nn.Module,
    batch: Batch,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    *,
    at: Mapping[str, Tensor] | None = None,
    differentiable: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the scalars at given points and their gradients there, from one forward.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: As in `gradients`.
        wrt: What `at` replaces and gradients are taken with respect to: inputs, features or activations.
        at: The points; None: where the batch is.
        differentiable: Keep the graph.

    Returns:
        `[n, *targets]`, with heads `[n, K, *targets]`; and what `gradients` returns.
    """
    request = resolve(model, batch, of, wrt, at=at, differentiable=differentiable)
    inner, points, heads = request.inner, request.points, request.heads
    with grad_mode(), preserved(inner, devices_of(inner)):
        capture = observe(request.model, request.batch, points, at=request.at, differentiable=differentiable)
        check_batch_axes(inner, request.batch, capture, points)
        values, found = pull_with_values(inner, capture, request.of, points, heads, differentiable=differentiable)
    check_independent(inner, request.batch, request.of, points, heads, request.at)
    if not differentiable:
        return values.detach(), {name: gradient.detach() for name, gradient in found.items()}
    return values, found
