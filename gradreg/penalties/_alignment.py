"""How much the gradients of several heads point the same way."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gradreg.errors import GradregError, HeadsError
from gradreg.penalties._precision import full_precision, precise

__all__ = ["SIMILARITIES", "alignment_matrix", "pairwise_alignment"]

SIMILARITIES = ("dot", "cosine", "cosine_squared", "dot_squared", "abs_cosine")
_REDUCTIONS = ("mean", "sum", "none")


def pairwise_alignment(
    gradients: Float[Tensor, "n heads *shape"],
    similarity: str = "cosine_squared",
    reduction: str = "mean",
    eps: float = 1e-12,
) -> Tensor:
    r"""How much the gradients of several heads point the same way, over pairs $i < j$.

    With $u_i = g_i / \sqrt{\lVert g_i \rVert^2 + \varepsilon}$: `dot` $g_i \cdot g_j$, `cosine` $u_i \cdot u_j$,
    `cosine_squared` $(u_i \cdot u_j)^2$, `dot_squared` $(g_i \cdot g_j)^2$, `abs_cosine` $\lvert u_i \cdot u_j \rvert$.

    `dot` and `cosine` use $\sum_{i<j} g_i \cdot g_j = \frac12 (\lVert \sum_i g_i \rVert^2 - \sum_i \lVert g_i \rVert^2)$ and
    need no `[n, K, K]`; the squared forms use the smaller of the `K x K` and the `d x d` second moments. `dot` has no lower
    bound. Everything is twice differentiable, also at vanishing gradients (`abs_cosine` where it is not zero).
    Low precision is accumulated in float32.

    Args:
        gradients: Gradients per example and head, `[n, K, *shape]`; the axes behind K are flattened.
        similarity: One of the five names.
        reduction: `"mean"` over pairs and examples, `"sum"` over pairs and examples, `"none"` for the sum over pairs of
            every example, `[n]`.
        eps: Added to the squared norm, in squared units of the gradients.

    Returns:
        A scalar, or `[n]`.

    Raises:
        GradregError: If a name is unknown or the shape does not fit.
        HeadsError: If there is a single head.

    References:
        Teney, Abbasnejad, Lucey, van den Hengel 2022, arXiv 2105.05612 (`dot`, sum); Ross, Pan, Celi, Doshi-Velez 2020,
        arXiv 1911.01291 (`cosine_squared`); Yang et al. 2021, arXiv 2104.00671 (`abs_cosine`).

    Example:
        >>> import torch, gradreg as gr
        >>> g = torch.tensor([[[1.0, 0.0], [1.0, 1.0]]])  # one example, two heads
        >>> gr.penalties.pairwise_alignment(g, similarity="dot"), gr.penalties.pairwise_alignment(g)
        (tensor(1.), tensor(0.5000))
    """
    flat = _checked(gradients, similarity)
    if reduction not in _REDUCTIONS:
        raise GradregError(f"reduction={reduction!r}; allowed are {', '.join(map(repr, _REDUCTIONS))}.")
    n, heads, _ = flat.shape
    with full_precision(flat):
        if similarity == "dot" and reduction != "none" and heads > 2:
            total, _ = _PairSum.apply(flat)
        else:
            sums = _pair_sums(flat, similarity, eps)
            total = sums if reduction == "none" else sums.sum()
    result: Tensor = total / (n * heads * (heads - 1) / 2) if reduction == "mean" else total
    return result


def alignment_matrix(
    gradients: Float[Tensor, "n heads *shape"], similarity: str = "cosine_squared", eps: float = 1e-12
) -> Float[Tensor, "n heads heads"]:
    r"""The similarity of every head with every head, `[n, K, K]`.

    Args:
        gradients: As in `pairwise_alignment`.
        similarity: As in `pairwise_alignment`.
        eps: As in `pairwise_alignment`.

    Returns:
        A symmetric matrix per example, the diagonal included.

    Raises:
        GradregError: If a name is unknown or the shape does not fit.
        HeadsError: If there is a single head.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.penalties.alignment_matrix(torch.tensor([[[3.0, 0.0], [0.0, 2.0]]]), similarity="dot")
        tensor([[[9., 0.],
                 [0., 4.]]])
    """
    flat = _checked(gradients, similarity)
    with full_precision(flat):
        return _matrix(flat, similarity, eps)


def _matrix(flat: Tensor, similarity: str, eps: float) -> Tensor:
    gram = _gram(flat)
    if similarity.startswith("dot"):
        return gram.square() if similarity == "dot_squared" else gram
    scale = (gram.diagonal(dim1=1, dim2=2) + eps).rsqrt()
    cosine = gram * scale.unsqueeze(1) * scale.unsqueeze(2)
    if similarity == "cosine_squared":
        return cosine.square()
    return cosine.abs() if similarity == "abs_cosine" else cosine


def _checked(gradients: Tensor, similarity: str) -> Tensor:
    if similarity not in SIMILARITIES:
        raise GradregError(f"similarity={similarity!r}; allowed are {', '.join(map(repr, SIMILARITIES))}.")
    if not isinstance(gradients, Tensor) or not gradients.is_floating_point() or gradients.dim() < 2:
        found = tuple(gradients.shape) if isinstance(gradients, Tensor) else type(gradients).__name__
        raise GradregError(f"Gradients must be a floating-point tensor [n, K, *shape], found {found}.")
    if gradients.shape[0] == 0:
        raise GradregError("The gradients hold no example.")
    if gradients.shape[1] < 2:
        raise HeadsError(
            f"Pairs need at least two heads; the gradients have {gradients.shape[1]} ({tuple(gradients.shape)}). With one head "
            "there is nothing to compare: add heads, or drop the penalty."
        )
    gradients = precise(gradients)
    return gradients.flatten(2) if gradients.dim() > 2 else gradients.unsqueeze(2)


def _pair_sums(flat: Tensor, similarity: str, eps: float) -> Tensor:
    """Sum over pairs i < j for every example, `[n]`."""
    heads, size = flat.shape[1:]
    if heads == 2:
        return _of_one_pair(flat, similarity, eps)
    if similarity == "abs_cosine":
        return _matrix(flat, similarity, eps).triu(1).sum((1, 2))
    if similarity in ("dot", "cosine"):
        squares = flat.square().sum(2)
        weight = torch.ones_like(squares) if similarity == "dot" else (squares + eps).rsqrt()
        total = (weight.unsqueeze(1) @ flat).squeeze(1)
        return (total.square().sum(1) - (squares * weight.square()).sum(1)) / 2
    if heads <= size:
        gram = _gram(flat)
        squared = gram.square()
        if similarity == "cosine_squared":
            weight = (gram.diagonal(dim1=1, dim2=2) + eps).reciprocal()
            squared = squared * weight.unsqueeze(1) * weight.unsqueeze(2)
        return squared.triu(1).sum((1, 2))
    squares = flat.square().sum(2)
    if similarity == "cosine_squared":
        flat = flat * (squares + eps).rsqrt().unsqueeze(2)
        squares = squares / (squares + eps)
    moments = _gram(flat.transpose(1, 2))
    return (moments.square().sum((1, 2)) - squares.square().sum(1)) / 2


def _of_one_pair(flat: Tensor, similarity: str, eps: float) -> Tensor:
    first, second = flat.unbind(1)
    dot = (first * second).sum(1)
    if similarity.startswith("dot"):
        return _similar(dot, similarity)
    return _similar(dot, similarity, (first.square().sum(1) + eps) * (second.square().sum(1) + eps))


def _similar(dot: Tensor, similarity: str, squares: Tensor | None = None) -> Tensor:
    """Return the similarity of pairs with these inner products and products of squared norms."""
    if squares is None:
        return dot if similarity == "dot" else dot.square()
    if similarity == "cosine_squared":
        return dot.square() / squares
    return dot * squares.rsqrt() if similarity == "cosine" else dot.abs() * squares.rsqrt()


def factors_are_cheaper(n: int, widths: Sequence[int], features: int, similarity: str) -> bool:
    """Whether `factored_alignment` multiplies fewer numbers than forming the gradients does.

    Args:
        n: Number of examples.
        widths: Width h of the first layer of every head.
        features: d.
        similarity: As in `pairwise_alignment`.
    """
    own = 0 if similarity.startswith("dot") else 1  # squared norms are pairs of a head with itself
    pairs = [(a, b) for i, a in enumerate(widths) for b in widths[i + 1 - own :]]
    return sum(a * b * (features + n) for a, b in pairs) < n * features * sum(widths)


def factored_alignment(factors: Sequence[tuple[Tensor, Tensor]], similarity: str, reduction: str, eps: float) -> Tensor:
    r"""`pairwise_alignment` of the gradients $\delta_k W_k$, without them: $g_i \cdot g_j = \delta_i (W_i W_j^\top) \delta_j$.

    For few heads whose first layer is narrower than the features: a product of two weights in place of one with every example.

    Args:
        factors: $\delta$ `[n, h]` and W `[h, d]` of every head.
        similarity: As in `pairwise_alignment`.
        reduction: `"mean"` or `"sum"`.
        eps: As in `pairwise_alignment`.

    Returns:
        The penalty.
    """
    pairs = [(precise(delta), precise(weight)) for delta, weight in factors]
    heads, n = len(pairs), len(pairs[0][0])

    def inner(i: int, j: int) -> Tensor:
        (left, of_left), (right, of_right) = pairs[i], pairs[j]
        return (left @ (of_left @ of_right.T) * right).sum(1)

    with full_precision(pairs[0][0]):
        if similarity.startswith("dot"):
            terms = [_similar(inner(i, j), similarity) for i in range(heads) for j in range(i + 1, heads)]
        else:
            squares = [inner(k, k) + eps for k in range(heads)]
            terms = [
                _similar(inner(i, j), similarity, squares[i] * squares[j])
                for i in range(heads)
                for j in range(i + 1, heads)
            ]
        total = torch.stack([term.sum() for term in terms]).sum() if len(terms) > 1 else terms[0].sum()
    return total / (n * len(terms)) if reduction == "mean" else total


def _gram(flat: Tensor) -> Tensor:
    result: Tensor = _Gram.apply(flat)
    return result


class _Gram(torch.autograd.Function):
    """G Gᵀ whose backward is one product instead of two and a sum: half the time and memory of the penalty."""

    generate_vmap_rule = True

    @staticmethod
    def forward(flat: Tensor) -> Tensor:
        return flat @ flat.transpose(-1, -2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (flat,) = ctx.saved_tensors
        result: Tensor = (cotangent + cotangent.transpose(-1, -2)) @ flat
        return result

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (flat,) = ctx.saved_tensors
        half: Tensor = tangent @ flat.transpose(-1, -2)
        return half + half.transpose(-1, -2)


class _PairSum(torch.autograd.Function):
    """Σ_n Σ_{i<j} g_i·g_j by the Gram identity, without a temporary of the size of the gradients in the forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(flat: Tensor) -> tuple[Tensor, Tensor]:
        # the engine hands over [n, K, d] as a view of [K, n, d]; in that order the memory is contiguous
        rows, total = _by_memory(flat).reshape(-1), flat.sum(1)
        return (total.square().sum() - torch.dot(rows, rows)) / 2, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> Tensor:
        flat, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            total = flat.sum(1)  # to be differentiated again, it must come from the gradients
        rows = _by_memory(flat)
        turned = rows is not flat
        total = total * cotangent
        result = torch.addcmul(total if turned else total.unsqueeze(1), rows, cotangent, value=-1)
        return result.transpose(0, 1) if turned else result

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, None]:
        (flat,) = ctx.saved_tensors
        return ((flat.sum(1, keepdim=True) - flat) * tangent).sum(), None


for _forward in (_Gram.forward, _PairSum.forward):
    # torch asks for the signature at every call of such a function; worked out once, small penalties cost half
    vars(_forward)["__signature__"] = inspect.signature(_forward)


def _by_memory(flat: Tensor) -> Tensor:
    turned = flat.transpose(0, 1)
    return turned if not flat.is_contiguous() and turned.is_contiguous() else flat
