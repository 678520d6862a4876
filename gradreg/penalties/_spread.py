"""How far rows lie from their mean."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gradreg.errors import GradregError
from gradreg.penalties._precision import full_precision, precise

__all__ = ["spread"]


def spread(rows: Float[Tensor, "rows ..."]) -> Float[Tensor, ""]:
    r"""Sum of squared distances of rows from their mean, $\sum_e \lVert g_e - \bar g \rVert^2$.

    Args:
        rows: Gradients, one per environment, `[E, *shape]`.

    Returns:
        A scalar; 0 for a single row.

    Raises:
        GradregError: If these are no floating-point rows.

    References:
        Koyama, Yamaguchi 2020, arXiv 2008.01883.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.penalties.spread(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        tensor(2.)
    """
    if not isinstance(rows, Tensor) or not rows.is_floating_point() or rows.dim() < 1 or len(rows) == 0:
        found = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise GradregError(f"Rows must be a floating-point tensor [E, *shape], found {found}.")
    rows = precise(rows)
    with full_precision(rows):
        result: Tensor = _Spread.apply(rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1))[0]
    return result


class _Spread(torch.autograd.Function):
    """Three passes over the rows and one backward, where plain operations take a dozen: deviations sum to zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor) -> tuple[Tensor, Tensor]:
        deviations = rows - rows.mean(0)
        flat = deviations.reshape(-1)
        return torch.dot(flat, flat), deviations

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> Tensor:
        rows, deviations = ctx.saved_tensors
        if torch.is_grad_enabled():
            deviations = rows - rows.mean(0)  # to be differentiated again, they must come from the rows
        result: Tensor = deviations * (2 * cotangent)
        return result

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return 2 * ((rows - rows.mean(0)) * tangent).sum(), None


# torch asks for the signature at every call of such a function; worked out once
vars(_Spread.forward)["__signature__"] = inspect.signature(_Spread.forward)
