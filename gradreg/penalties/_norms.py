"""Norms and cosines of gradients that can be differentiated twice everywhere, also at zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from gradreg.errors import GradregError
from gradreg.penalties._precision import full_precision, precise

__all__ = ["cosine", "norm", "squared_norm"]

Gradients: TypeAlias = Tensor | Mapping[str, Tensor]


def squared_norm(gradients: Gradients, *, leading: int = 1) -> Tensor:
    r"""Squared norm of every example's gradient over all its own axes, $\lVert g_i \rVert^2 = \sum_{\text{axes}} g_i^2$.

    Needs no eps: it is smooth everywhere. Low precision is summed in float32, also under autocast.

    Args:
        gradients: `[n, *shape]`, or several by key as `gr.gradients` returns them; their squares are added.
        leading: The number of axes that are kept: 1 for examples, 2 for examples and heads.

    Returns:
        `[n]`, or the leading axes.

    Raises:
        GradregError: If these are no floating-point gradients.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.penalties.squared_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([25.,  0.])
    """
    return _dot(gradients, gradients, leading)


def norm(gradients: Gradients, *, eps: float = 1e-12, leading: int = 1) -> Tensor:
    r"""Norm of every example's gradient, $\sqrt{\lVert g_i \rVert^2 + \varepsilon}$.

    `g.norm()` has NaN as second derivative at zero and `g.square().sum().sqrt()` as first. With eps inside the root both
    exist: at zero the value is $\sqrt\varepsilon$, the gradient 0, the Hessian $I / \sqrt\varepsilon$.

    Args:
        gradients: As in `squared_norm`.
        eps: Added inside the root, in squared units of the gradients. 1e-12 changes norms above 1e-3 by less than 1e-6 of
            themselves.
        leading: As in `squared_norm`.

    Returns:
        `[n]`, or the leading axes.

    Raises:
        GradregError: If these are no floating-point gradients, or eps is not above 0.

    Example:
        >>> import torch, gradreg as gr
        >>> g = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
        >>> gr.penalties.norm(g).sum().backward()
        >>> g.grad
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    check_eps(eps)
    return (squared_norm(gradients, leading=leading) + eps).sqrt()


def cosine(first: Gradients, second: Gradients, *, eps: float = 1e-12, leading: int = 1) -> Tensor:
    r"""Cosine of two gradients, $a_i \cdot b_i / \sqrt{(\lVert a_i \rVert^2 + \varepsilon)(\lVert b_i \rVert^2 + \varepsilon)}$.

    A vector far below $\sqrt\varepsilon$ has cosine 0 with all others, smoothly, instead of a random direction and a derivative
    of 1e7.

    Args:
        first: As in `squared_norm`.
        second: Of the same shape, or one that broadcasts.
        eps: Added to both squared norms, in squared units of the gradients.
        leading: As in `squared_norm`.

    Returns:
        `[n]`, or the leading axes.

    Raises:
        GradregError: If these are no floating-point gradients of the same keys, or eps is not above 0.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.penalties.cosine(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 1.0]]))
        tensor([0.7071, 0.0000])
    """
    check_eps(eps)
    scale = (squared_norm(first, leading=leading) + eps).rsqrt() * (squared_norm(second, leading=leading) + eps).rsqrt()
    return _dot(first, second, leading) * scale


def check_eps(eps: float) -> None:
    """Refuse an eps that guards nothing.

    Raises:
        GradregError: If it is not a positive, finite number.
    """
    if not isinstance(eps, (int, float)) or not math.isfinite(eps) or eps <= 0:
        raise GradregError(
            f"eps={eps!r}; it must be a positive number: at a vanishing gradient the second derivative of a norm without it "
            "is NaN. For no eps, use squared_norm."
        )


def _dot(first: Gradients, second: Gradients, leading: int) -> Tensor:
    a = _named(first)
    b = a if second is first else _named(second)
    if a.keys() != b.keys():
        raise GradregError(f"The gradients have different keys: {sorted(a)} and {sorted(b)}.")
    total: Tensor | None = None
    for name, value in a.items():
        left = _checked(value, name, leading)
        with full_precision(left):
            # a square has one way back where a product of two has two
            product = left.square() if b is a else left * _checked(b[name], name, leading)
            term = product.sum(tuple(range(leading, product.dim()))) if product.dim() > leading else product
            total = term if total is None else total + term
    if total is None:
        raise GradregError("There are no gradients: the mapping is empty.")
    return total


def _named(gradients: Gradients) -> dict[str, Tensor]:
    return {"gradients": gradients} if isinstance(gradients, Tensor) else dict(gradients)


def _checked(value: object, name: str, leading: int) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < leading:
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise GradregError(
            f"{name!r} must be a real floating-point tensor with at least {leading} axes, found {found}."
            + (
                " Of complex gradients take torch.view_as_real."
                if isinstance(value, Tensor) and torch.is_complex(value)
                else ""
            )
        )
    return precise(value)
