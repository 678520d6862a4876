"""Safe norms and cosines: values, derivatives at zero, precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from gradreg.errors import GradregError
from gradreg.penalties import cosine, norm, squared_norm


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_all_axes_behind_the_examples_count() -> None:
    g = random(3, 2, 4, 5)
    expected = torch.stack([(one**2).sum() for one in g])
    torch.testing.assert_close(squared_norm(g), expected)
    torch.testing.assert_close(norm(g), (expected + 1e-12).sqrt())
    assert norm(g, leading=2).shape == (3, 2)
    torch.testing.assert_close(squared_norm(g, leading=2).sum(1), expected)
    assert squared_norm(random(3)).shape == (3,)


def test_several_keys_are_one_vector() -> None:
    a, b = random(3, 4), random(3, 2, 2)
    torch.testing.assert_close(norm({"a": a, "b": b}), norm(torch.cat([a, b.flatten(1)], 1)))
    own = {"a": a, "b": b}
    other = {"b": random(3, 2, 2), "a": random(3, 4)}
    joined = cosine(*(torch.cat([g["a"], g["b"].flatten(1)], 1) for g in (own, other)))
    torch.testing.assert_close(cosine(own, other), joined)


def test_cosine_is_torchs_away_from_zero() -> None:
    a, b = random(4, 3, 2), random(4, 3, 2)
    torch.testing.assert_close(cosine(a, b), torch.cosine_similarity(a.flatten(1), b.flatten(1)))


@pytest.mark.parametrize(
    "function", [norm, squared_norm, lambda g: cosine(g, g.flip(0).sin())], ids=["norm", "sq", "cos"]
)
def test_derivatives(function: object) -> None:
    g = random(3, 4).requires_grad_()
    assert gradcheck(function, g)
    assert gradgradcheck(function, g)


def test_second_derivative_at_zero_is_what_the_formula_says() -> None:
    g = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    hessian = torch.autograd.functional.hessian(lambda v: norm(v, eps=1e-4).sum(), g).reshape(3, 3)
    torch.testing.assert_close(hessian, 100 * torch.eye(3, dtype=torch.float64))
    naive = torch.autograd.functional.hessian(lambda v: v.norm(), g)
    assert naive.isnan().any()  # what this is for


def test_vanishing_vectors_have_cosine_zero_and_tame_derivatives() -> None:
    zero = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    other = random(2, 3)
    value = cosine(zero, other, eps=1e-6)
    (first,) = torch.autograd.grad(value.sum(), zero, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), zero)
    assert value.tolist() == [0, 0]
    assert first.abs().max() <= 1e3 + 1
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    g = torch.full((2, 1000), 300.0).to(dtype)
    assert squared_norm(g).dtype == torch.float32
    torch.testing.assert_close(squared_norm(g), g.float().square().sum(1))
    small = torch.full((2, 1000), 1e-5).to(dtype)
    assert squared_norm(small).min() > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(squared_norm(g), g.float().square().sum(1))


def test_bad_input() -> None:
    with pytest.raises(GradregError, match="eps=0"):
        norm(random(2, 3), eps=0)
    with pytest.raises(GradregError, match="view_as_real"):
        squared_norm(torch.zeros(2, 3, dtype=torch.complex64))
    with pytest.raises(GradregError, match="different keys"):
        cosine({"a": random(2, 3)}, {"b": random(2, 3)})
    with pytest.raises(GradregError, match="empty"):
        squared_norm({})
    with pytest.raises(GradregError, match="at least 2 axes"):
        squared_norm(random(2), leading=2)
