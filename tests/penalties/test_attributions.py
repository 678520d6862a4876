"""Total variation and the Gini coefficient against double loops."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from gradreg.errors import GradregError
from gradreg.penalties import gini, total_variation


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_total_variation() -> None:
    a = random(2, 3, 4, 5)
    expected = []
    for one in a:
        total = 0.0
        for c in range(3):
            for i in range(4):
                for j in range(5):
                    total += float((one[c, i + 1, j] - one[c, i, j]).abs()) if i < 3 else 0.0
                    total += float((one[c, i, j + 1] - one[c, i, j]).abs()) if j < 4 else 0.0
        expected.append(total)
    torch.testing.assert_close(total_variation(a), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(total_variation(a, axes=[1]), a.diff(dim=1).abs().sum((1, 2, 3)))
    torch.testing.assert_close(total_variation(a[:, 0, 0]), a[:, 0, 0].diff().abs().sum(1))


def test_gini() -> None:
    a = random(7).abs()
    pairs = sum(float((x - y).abs()) for x in a for y in a)
    torch.testing.assert_close(gini(a), torch.tensor(pairs / (2 * 7 * float(a.sum())), dtype=torch.float64))
    torch.testing.assert_close(gini(a[torch.randperm(7)]), gini(a))
    assert gini(torch.zeros(4)) == 0
    assert gini(torch.ones(1)) == 0


@pytest.mark.parametrize("function", [total_variation, lambda a: gini(a.flatten().square())], ids=["variation", "gini"])
def test_derivatives(function: object) -> None:
    a = random(2, 5).requires_grad_()
    assert gradcheck(function, a)
    assert gradgradcheck(function, a)


def test_bad_input() -> None:
    with pytest.raises(GradregError, match="axes 1 to 1"):
        total_variation(random(2, 5), axes=[2])
    with pytest.raises(GradregError, match="vector"):
        gini(random(2, 2))
