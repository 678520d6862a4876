"""Numbers built of gradients: derivatives by a scale of the outputs, and steps along the gradient of a penalty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradreg.engine._checks import check_independent
from gradreg.engine._evaluate import evaluate
from gradreg.engine._observe import Capture, grad_mode, observe
from gradreg.engine._points import Points
from gradreg.engine._pull import pull
from gradreg.engine._request import head_count, resolve
from gradreg.engine._session import current_session
from gradreg.model import devices_of, preserved
from gradreg.scalars import ScalarFunction, read_outputs
from gradreg.wrt import Outputs


def output_scale_derivatives(model: nn.Module, batch: Any, of: ScalarFunction) -> Tensor:
    r"""Return the derivative of $\mathrm{of}(w z_i)$ by w at 1, $\langle \partial\,\mathrm{of} / \partial z_i, z_i \rangle$.

    z are the outputs that `of` reads. Exact, with graph, and read from the shared forward of a session where there is one.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: As in `gradients`; one value per example.

    Returns:
        `[n, *targets]`, with heads `[n, K, *targets]`.
    """
    points = Points(outputs=True)
    session = current_session()
    if (
        session is not None
        and batch is session.batch
        and session.might_serve(model, batch, "example", None, True, "auto")
    ):
        found = session.serve(of, Outputs(), batch)
        if found is not None:
            return _against(found["outputs"], session.capture, of, head_count(session.inner))
    request = resolve(model, batch, of, Outputs(), differentiable=True)
    inner, heads = request.inner, request.heads
    with grad_mode(), preserved(inner, devices_of(inner)):
        capture = observe(model, request.batch, points, differentiable=True)
        found = pull(inner, capture, request.of, points, heads, differentiable=True)
    check_independent(inner, request.batch, request.of, points, heads, {})
    return _against(found["outputs"], capture, request.of, heads)


def _against(gradient: Tensor, capture: Capture, of: ScalarFunction, heads: int | None) -> Tensor:
    """Contract gradients `[n, (K,) *targets, *shape]` with the outputs `[n, (K,) *shape]`."""
    outputs = read_outputs(capture.outputs, getattr(of, "output", None))
    leading = evaluate(of, capture.outputs, capture.batch, heads).dim()
    own = outputs.dim() - (gradient.dim() - leading)  # axes of the outputs that scalars keep: examples, heads
    product = gradient * outputs.reshape(*outputs.shape[:own], *[1] * (leading - own), *outputs.shape[own:])
    return product.flatten(leading).sum(leading) if product.dim() > leading else product


def tensor_gradient(number: Tensor, tensor: Tensor) -> Tensor:
    """Return the gradient, without graph, of a number with respect to a tensor that it was computed from; zero where not.

    For steps along the gradient of a penalty itself, which is built of gradients already.

    Args:
        number: A scalar.
        tensor: A tensor that requires grad.
    """
    if not number.requires_grad:
        return torch.zeros_like(tensor)
    (found,) = torch.autograd.grad(number, [tensor], allow_unused=True, materialize_grads=True)
    return found
