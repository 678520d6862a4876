"""Quadratic forms of gradients against their definitions, with their derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from gradreg.penalties import factored_quadratic_form, quadratic_form


def symmetric(m: int) -> Tensor:
    root = torch.randn(m, m, dtype=torch.float64)
    return root + root.T


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_rows() -> None:
    rows, matrix = random(3, 4), symmetric(3)
    expected = sum(matrix[i, j] * (rows[i] * rows[j]).sum() for i in range(3) for j in range(3))
    torch.testing.assert_close(quadratic_form(rows, matrix), expected, rtol=1e-12, atol=1e-13)
    assert gradcheck(lambda r: quadratic_form(r, matrix), rows)
    assert gradgradcheck(lambda r: quadratic_form(r, matrix), rows)


def test_forward_mode_and_vmap() -> None:
    rows, direction, matrix = random(3, 4).detach(), random(3, 4).detach(), symmetric(3)
    form = lambda r: quadratic_form(r, matrix)
    _, tangent = torch.func.jvp(form, (rows,), (direction,))
    torch.testing.assert_close(tangent, (torch.func.grad(form)(rows) * direction).sum())
    stack = random(2, 3, 4).detach()
    torch.testing.assert_close(torch.func.vmap(form)(stack), torch.stack([form(one) for one in stack]))


@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True)])
def test_factors(weight: bool, bias: bool) -> None:
    h, d, matrix = random(4, 3), random(4, 2), symmetric(4)
    gradients = [
        torch.cat([*([torch.outer(d[i], h[i]).flatten()] if weight else []), *([d[i]] if bias else [])])
        for i in range(4)
    ]
    expected = quadratic_form(torch.stack(gradients), matrix)
    found = factored_quadratic_form(h, d, matrix, weight, bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert gradcheck(lambda h, d: factored_quadratic_form(h, d, matrix, weight, bias), (h, d))
    assert gradgradcheck(lambda h, d: factored_quadratic_form(h, d, matrix, weight, bias), (h, d))


def test_low_precision_is_accumulated_in_float32() -> None:
    rows, matrix = (300 * torch.randn(3, 50)).half(), symmetric(3).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(quadratic_form(rows, matrix), quadratic_form(rows.float(), matrix))
