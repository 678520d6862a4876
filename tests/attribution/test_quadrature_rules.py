"""Nodes and weights: exactness, nesting, sums of one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradreg.attribution._quadrature import GaussLegendre, LogSpaced, as_rule, kronrod, nested_gauss
from gradreg.errors import GradregError


def moments(alpha: torch.Tensor, weights: torch.Tensor, degree: int) -> float:
    """The largest error of integrals of powers up to a degree over (0, 1)."""
    return max(abs(float((weights * alpha**k).sum()) - 1 / (k + 1)) for k in range(degree + 1))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 20, 50])
def test_gauss_is_exact_to_its_degree_and_is_that_of_numpy(n: int) -> None:
    nodes = nested_gauss(n, GaussLegendre())
    points, weights = np.polynomial.legendre.leggauss(n)
    assert np.allclose(nodes.alpha.numpy(), (points + 1) / 2, atol=1e-15)
    assert np.allclose(nodes.weights.numpy(), weights / 2, atol=1e-15)
    assert moments(nodes.alpha, nodes.weights, 2 * n - 1) < 1e-13


@pytest.mark.parametrize("n", [2, 3, 8, 50, 51, 200])
def test_the_nested_rule_uses_every_other_node_with_positive_weights(n: int) -> None:
    nodes = nested_gauss(n, GaussLegendre())
    assert nodes.nested is not None
    used = nodes.nested != 0
    assert used.tolist() == [i % 2 == 0 for i in range(n)]
    assert bool((nodes.nested[used] > 0).all())
    assert moments(nodes.alpha, nodes.nested, min(int(used.sum()) - 1, 20)) < 1e-13


def test_one_node_has_no_nested_rule() -> None:
    assert nested_gauss(1, GaussLegendre()).nested is None


@pytest.mark.parametrize("n", [1, 2, 3, 7, 15, 31])
def test_kronrod_is_exact_to_3n_plus_1_and_holds_gauss(n: int) -> None:
    nodes = kronrod(n, GaussLegendre())
    assert len(nodes.alpha) == 2 * n + 1
    assert bool((nodes.alpha.diff() > 0).all())
    assert bool((nodes.weights > 0).all())
    assert moments(nodes.alpha, nodes.weights, 3 * n + 1) < 1e-13
    assert nodes.nested is not None
    gauss = nested_gauss(n, GaussLegendre())
    assert torch.allclose(nodes.alpha[nodes.nested != 0], gauss.alpha, atol=1e-15)
    assert torch.allclose(nodes.nested[nodes.nested != 0], gauss.weights, atol=1e-15)


def test_kronrod_of_seven_is_the_known_one() -> None:
    """The outermost and the middle abscissa and weight of the 15-point rule, as published (on (-1, 1))."""
    nodes = kronrod(7, GaussLegendre())
    assert float(2 * nodes.alpha[-1] - 1) == pytest.approx(0.991455371120812639, abs=1e-15)
    assert float(2 * nodes.weights[-1]) == pytest.approx(0.022935322010529225, abs=1e-15)
    assert float(2 * nodes.weights[7]) == pytest.approx(0.209482141084727828, abs=1e-15)


@pytest.mark.parametrize("start", [1e-8, 1e-3])
@pytest.mark.parametrize("make", [nested_gauss, kronrod])
def test_log_spaced_rules_sum_to_one_and_resolve_a_spike(start: float, make) -> None:
    nodes = make(40, LogSpaced(start))
    assert float(nodes.weights.sum()) == pytest.approx(1, abs=1e-14)
    assert float(nodes.nested.sum()) == pytest.approx(1, abs=1e-14)
    width = start * 10
    spike = width / (nodes.alpha + width) ** 2  # integrates to 1 / (1 + width)
    assert float((nodes.weights * spike).sum()) == pytest.approx(1 / (1 + width), rel=1e-6)
    assert float((nodes.weights * nodes.alpha**2).sum()) == pytest.approx(1 / 3, rel=1e-6)


def test_plain_nodes_miss_that_spike() -> None:
    nodes = nested_gauss(40, GaussLegendre())
    assert float((nodes.weights * 1e-7 / (nodes.alpha + 1e-7) ** 2).sum()) < 0.01


@pytest.mark.parametrize("rule", ["simpson", 3, None])
def test_unknown_rules_are_refused(rule: object) -> None:
    with pytest.raises(GradregError, match="gauss_legendre"):
        as_rule(rule)


@pytest.mark.parametrize("start", [0.0, 1.0, -1.0, math.nan])
def test_the_start_of_log_spacing_is_checked(start: float) -> None:
    with pytest.raises(GradregError, match="between 0 and 1"):
        LogSpaced(start)
