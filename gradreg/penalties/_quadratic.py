"""Quadratic forms of gradients, with as few passes over them as can be."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gradreg.penalties._alignment import _gram
from gradreg.penalties._precision import full_precision, precise


def quadratic_form(rows: Float[Tensor, "m d"], matrix: Float[Tensor, "m m"]) -> Float[Tensor, ""]:
    r"""Return $\sum_{ef} A_{ef}\, g_e \cdot g_f$ for a constant, symmetric A.

    Args:
        rows: g, `[m, d]`.
        matrix: A.
    """
    rows = precise(rows)
    with full_precision(rows):
        result: Tensor = _Quadratic.apply(rows, matrix.to(rows))[0]
    return result


def factored_quadratic_form(
    inputs: Float[Tensor, "n i"],
    cotangents: Float[Tensor, "n o"],
    matrix: Float[Tensor, "n n"],
    weight: bool,
    bias: bool,
) -> Float[Tensor, ""]:
    r"""Return $\sum_{ij} A_{ij}\, g_i \cdot g_j$ for gradients $g_i = (\delta_i h_i^\top, \delta_i)$ of a linear layer.

    $g_i \cdot g_j = (\delta_i \cdot \delta_j)(h_i \cdot h_j + 1)$: no gradient is formed.

    Args:
        inputs: h.
        cotangents: delta.
        matrix: A, constant and symmetric.
        weight: Whether the weight takes part.
        bias: Whether the bias does.
    """
    h, d = precise(inputs), precise(cotangents)
    with full_precision(d):
        products = _gram(h.to(d)) + float(bias) if weight else 1.0
        return (_gram(d) * products * matrix.to(d)).sum()


def factored_row_distance(
    ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], eps: float = 1e-12
) -> Float[Tensor, ""]:
    r"""Return $\sum_r (1 - \cos(a_r, b_r))$ of the rows of two mean weight gradients of a linear layer, which are not formed.

    Args:
        ours: Inputs `[n, i]` of the layer and cotangents `[n, o]`; the gradient is $\frac1n \sum_k \delta_k h_k^\top$.
        theirs: The same of other examples.
        eps: Added to squared norms.
    """
    (h, d), (other_h, other_d) = (tuple(map(precise, side)) for side in (ours, theirs))
    with full_precision(d):
        d, other_d = d / len(d), other_d / len(other_d)
        dot = ((h @ other_h.T) @ other_d * d).sum(0)
        # rounding may leave a square of vanishing rows just below zero
        squares = [((x @ x.T) @ y * y).sum(0).clamp(min=0) + eps for x, y in ((h, d), (other_h, other_d))]
        return (1 - dot * squares[0].rsqrt() * squares[1].rsqrt()).sum()


class _Quadratic(torch.autograd.Function):
    """The product A G is kept for the backward, which is one pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        product = matrix @ rows
        return torch.dot(product.reshape(-1), rows.reshape(-1)), product

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> tuple[Tensor, None]:
        rows, matrix, product = ctx.saved_tensors
        if torch.is_grad_enabled():
            product = matrix @ rows  # to be differentiated again, it must come from the rows
        return product * (2 * cotangent), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> tuple[Tensor, None]:
        rows, matrix = ctx.saved_tensors
        return 2 * ((matrix @ rows) * tangent).sum(), None


# torch asks for the signature at every call of such a function; worked out once
vars(_Quadratic.forward)["__signature__"] = inspect.signature(_Quadratic.forward)
