"""penalties.pairwise_alignment against a double loop, its derivatives, and its edges."""

from __future__ import annotations

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError, jaxtyped
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from gradreg.errors import GradregError, HeadsError
from gradreg.penalties import SIMILARITIES, alignment_matrix, pairwise_alignment

EVERY = pytest.mark.parametrize("similarity", SIMILARITIES)
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def double_loop(gradients: Tensor, similarity: str, reduction: str, eps: float = 1e-12) -> Tensor:
    """The formula, pair by pair."""
    flat = gradients.flatten(2)
    unit = flat / (flat.square().sum(2, keepdim=True) + eps).sqrt()
    per_example = torch.zeros(flat.shape[0], dtype=flat.dtype)
    pairs = 0
    for i in range(flat.shape[1]):
        for j in range(i + 1, flat.shape[1]):
            dot, cosine = (flat[:, i] * flat[:, j]).sum(1), (unit[:, i] * unit[:, j]).sum(1)
            values = {
                "dot": dot,
                "dot_squared": dot.square(),
                "cosine": cosine,
                "cosine_squared": cosine.square(),
                "abs_cosine": cosine.abs(),
            }
            per_example = per_example + values[similarity]
            pairs += 1
    return {"mean": per_example.mean() / pairs, "sum": per_example.sum(), "none": per_example}[reduction]


def random(n: int, heads: int, *shape: int) -> Tensor:
    return torch.randn(n, heads, *shape, dtype=torch.float64)


@EVERY
@REDUCTIONS
@given(n=st.integers(1, 3), heads=st.integers(2, 6), size=st.integers(1, 8), turned=st.booleans())
@settings(max_examples=15, deadline=None)
def test_equals_the_double_loop(similarity: str, reduction: str, n: int, heads: int, size: int, turned: bool) -> None:
    gradients = (
        random(heads, n, size).transpose(0, 1) if turned else random(n, heads, size)
    )  # the engine's layout, or not
    value = pairwise_alignment(gradients, similarity, reduction)
    torch.testing.assert_close(value, double_loop(gradients, similarity, reduction), rtol=1e-10, atol=1e-12)


@EVERY
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 5, 3), (2, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_first_and_second_derivative(similarity: str, shape: tuple[int, ...], reduction: str) -> None:
    gradients = random(*shape).requires_grad_()
    assert gradcheck(lambda g: pairwise_alignment(g, similarity, reduction), gradients)
    assert gradgradcheck(lambda g: pairwise_alignment(g, similarity, reduction), gradients)


@EVERY
def test_forward_mode_and_vmap(similarity: str) -> None:
    gradients, direction = random(2, 3, 4), random(2, 3, 4)
    function = lambda g: pairwise_alignment(g, similarity)
    _, tangent = torch.func.jvp(function, (gradients,), (direction,))
    expected = (torch.func.grad(function)(gradients) * direction).sum()
    torch.testing.assert_close(tangent, expected)
    stack = random(3, 2, 3, 4)
    torch.testing.assert_close(torch.func.vmap(function)(stack), torch.stack([function(g) for g in stack]))
    batched = torch.func.vmap(torch.func.grad(function))(stack)
    torch.testing.assert_close(batched, torch.stack([torch.func.grad(function)(g) for g in stack]))


@EVERY
def test_matrix_holds_every_pair(similarity: str) -> None:
    gradients = random(2, 4, 3)
    matrix = alignment_matrix(gradients, similarity)
    assert matrix.shape == (2, 4, 4)
    torch.testing.assert_close(matrix, matrix.transpose(1, 2))
    torch.testing.assert_close(matrix.triu(1).sum((1, 2)), double_loop(gradients, similarity, "none"))


@EVERY
def test_vanishing_gradients_stay_finite(similarity: str) -> None:
    gradients = random(2, 3, 4)
    gradients[:, 1] = 0
    gradients.requires_grad_()
    (first,) = torch.autograd.grad(pairwise_alignment(gradients, similarity), gradients, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), gradients)
    assert torch.isfinite(first).all()
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_accumulated_in_float32(dtype: torch.dtype) -> None:
    gradients = torch.randn(4, 3, 64).to(dtype)
    value = pairwise_alignment(gradients, "dot")
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, pairwise_alignment(gradients.float(), "dot"))


def test_dot_has_no_lower_bound_and_the_cosines_do() -> None:
    gradients = random(3, 2, 4)
    gradients[:, 1] = -gradients[:, 0]
    assert pairwise_alignment(10 * gradients, "dot") < 50 * pairwise_alignment(gradients, "dot")
    torch.testing.assert_close(pairwise_alignment(10 * gradients, "cosine"), torch.tensor(-1.0, dtype=torch.float64))


def test_bad_input() -> None:
    with pytest.raises(HeadsError, match="nothing to compare"):
        pairwise_alignment(random(2, 1, 3))
    with pytest.raises(GradregError, match="cosine_squared"):
        pairwise_alignment(random(2, 3, 3), "cosin")
    with pytest.raises(GradregError, match="reduction"):
        pairwise_alignment(random(2, 3, 3), reduction="median")
    with pytest.raises(GradregError, match="no example"):
        pairwise_alignment(random(0, 3, 3))
    with pytest.raises(GradregError, match="floating-point"):
        pairwise_alignment(torch.ones(2, 3, 3, dtype=torch.long))
    with pytest.raises(GradregError, match=r"\[n, K"):
        pairwise_alignment(torch.ones(3))


@EVERY
def test_annotated_shapes_are_true(similarity: str) -> None:
    checked = jaxtyped(typechecker=beartype)(alignment_matrix)
    assert checked(random(2, 3, 4, 5), similarity).shape == (2, 3, 3)
    with pytest.raises(TypeCheckError):
        checked(torch.randn(2), similarity)
