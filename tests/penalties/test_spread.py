"""penalties.spread against plain arithmetic, with its derivatives."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from gradreg.errors import GradregError
from gradreg.penalties import spread


@pytest.mark.parametrize("shape", [(4,), (1, 3), (3, 2), (2, 3, 2)], ids=str)
def test_value_and_derivatives(shape: tuple[int, ...]) -> None:
    rows = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    expected = sum((row - sum(rows) / len(rows)).square().sum() for row in rows)
    torch.testing.assert_close(spread(rows), expected, rtol=1e-12, atol=1e-14)
    assert gradcheck(spread, rows)
    assert gradgradcheck(spread, rows)


def test_forward_mode_and_vmap() -> None:
    rows, direction = torch.randn(3, 2).double(), torch.randn(3, 2).double()
    _, tangent = torch.func.jvp(spread, (rows,), (direction,))
    torch.testing.assert_close(tangent, (torch.func.grad(spread)(rows) * direction).sum())
    stack = torch.randn(2, 3, 2).double()
    torch.testing.assert_close(torch.func.vmap(spread)(stack), torch.stack([spread(rows) for rows in stack]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_accumulated_in_float32(dtype: torch.dtype) -> None:
    rows = (300 * torch.randn(3, 50)).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = spread(rows)
    torch.testing.assert_close(value, spread(rows.float()))


def test_bad_input() -> None:
    for rows in (torch.ones(2, 2, dtype=torch.long), torch.ones(()), torch.ones(0, 2), "rows"):
        with pytest.raises(GradregError, match="floating-point"):
            spread(rows)
