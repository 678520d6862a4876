"""Rules for integrals over the path from a baseline to the input, each with a second rule on the same nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numpy.polynomial import legendre
from torch import Tensor

from gradreg.errors import GradregError

__all__ = ["GaussLegendre", "LogSpaced", "Nodes", "Rule", "as_rule", "kronrod", "nested_gauss"]

Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Nodes:
    """Nodes in (0, 1), and two rules on them; all float64.

    Attributes:
        alpha: `[S]`, rising.
        weights: `[S]`, summing to one.
        nested: `[S]`, the weights of the second rule, zero at nodes that it leaves out; None for a single node.
    """

    alpha: Tensor
    weights: Tensor
    nested: Tensor | None


class Rule(Protocol):
    """Where nodes lie between 0 and 1."""

    def mapped(self, u: Array) -> tuple[Array, Array]:
        r"""Return $\alpha(u)$ and $d\alpha/du$ for u in (0, 1)."""
        ...


@dataclass(frozen=True)
class GaussLegendre:
    """Gauss-Legendre nodes in alpha itself: exact for integrands that are polynomials of degree 2n - 1."""

    def mapped(self, u: Array) -> tuple[Array, Array]:
        """Return u, and ones."""
        return u, np.ones_like(u)


@dataclass(frozen=True)
class LogSpaced:
    r"""Gauss-Legendre in u with $\alpha = a_0 (e^{u \log(1 + 1/a_0)} - 1)$: nodes that crowd towards the baseline.

    For baselines where a normalization layer is given a vector of zeros: the integrand is then a spike of width
    $\sqrt{\varepsilon} / \mathrm{std}(x)$ at alpha = 0, which evenly spread nodes miss.

    Args:
        start: $a_0$, the width from which on the spacing grows. Smaller ones resolve narrower spikes and need more nodes.

    Raises:
        GradregError: If it is not between 0 and 1.

    Example:
        >>> from gradreg.attribution import LogSpaced
        >>> LogSpaced(1e-4)
        LogSpaced(start=0.0001)
    """

    start: float = 1e-8

    def __post_init__(self) -> None:
        if not 0 < self.start < 1:
            raise GradregError(f"LogSpaced({self.start!r}): the start lies between 0 and 1.")

    def mapped(self, u: Array) -> tuple[Array, Array]:
        """Return the nodes and their density."""
        rate = math.log1p(1 / self.start)
        return self.start * np.expm1(u * rate), self.start * rate * np.exp(u * rate)


_NAMES: dict[str, GaussLegendre | LogSpaced] = {"gauss_legendre": GaussLegendre(), "log": LogSpaced()}


def as_rule(rule: object) -> GaussLegendre | LogSpaced:
    """Return a rule by its name, or as it was given.

    Raises:
        GradregError: If there is no such rule.
    """
    if isinstance(rule, str) and rule in _NAMES:
        return _NAMES[rule]
    if isinstance(rule, (GaussLegendre, LogSpaced)):
        return rule
    raise GradregError(
        f"rule={rule!r}; allowed are {', '.join(map(repr, _NAMES))}, gradreg.attribution.GaussLegendre() and "
        "gradreg.attribution.LogSpaced(start)."
    )


def nested_gauss(n: int, rule: Rule) -> Nodes:
    """Return n Gauss nodes; the second rule is the interpolatory one on every other node (positive weights for every n).

    Args:
        n: Number of nodes.
        rule: Where they lie.
    """
    nodes, weights = _gauss(n)
    nested = _interpolatory(nodes[::2]) if n > 1 else None
    return _on_unit(nodes, weights, nested, rule)


def kronrod(n: int, rule: Rule) -> Nodes:
    """Return the 2n + 1 Gauss-Kronrod nodes, exact to degree 3n + 1; the second rule is Gauss on n of them.

    The n + 1 further nodes are the roots of Stieltjes' polynomial, found in a Legendre basis: one lies between every two
    neighboring Gauss nodes.

    Args:
        n: Number of Gauss nodes.
        rule: Where they lie.

    References:
        Kronrod 1965, Nodes and Weights of Quadrature Formulas; Laurie 1997, Math. Comp. 66(219), for the error estimate.
    """
    gauss, gauss_weights = _gauss(n)
    between = _between(gauss, _stieltjes(n))
    nodes = np.concatenate([gauss, between])
    order = np.argsort(nodes)
    nested = np.concatenate([gauss_weights, np.zeros(n + 1)])[order]
    nodes = nodes[order]
    return _on_unit(nodes, _interpolatory(nodes), nested[nested > 0], rule, nested > 0)


def _on_unit(
    nodes: Array, weights: Array, nested: Array | None, rule: Rule, kept: npt.NDArray[np.bool_] | None = None
) -> Nodes:
    """Move rules from (-1, 1) to (0, 1) and through the map of nodes; weights are made to sum to one."""
    alpha, density = rule.mapped((nodes + 1) / 2)
    found = [weights * density]
    if nested is not None:
        mask = np.arange(len(nodes)) % 2 == 0 if kept is None else kept
        own = np.zeros(len(nodes))
        own[mask] = nested * density[mask]
        found.append(own)
    whole = [torch.from_numpy(values / values.sum()) for values in found]
    return Nodes(torch.from_numpy(alpha.copy()), whole[0], whole[1] if len(whole) > 1 else None)


@lru_cache(maxsize=32)
def _gauss(n: int) -> tuple[Array, Array]:
    nodes, weights = legendre.leggauss(n)
    return nodes, weights


def _interpolatory(nodes: Array) -> Array:
    """Return the weights that integrate every polynomial of degree below the number of nodes over (-1, 1)."""
    moments = np.zeros(len(nodes))
    moments[0] = 2
    return np.asarray(np.linalg.solve(legendre.legvander(nodes, len(nodes) - 1).T, moments))


def _stieltjes(n: int) -> Array:
    """Return the Legendre coefficients of the polynomial of degree n + 1 that P_n makes orthogonal to all lower degrees."""
    points, weights = _gauss(2 * n + 2)
    values = legendre.legvander(points, n + 1)
    basis, tests = np.arange((n + 1) % 2, n + 1, 2), np.arange(1, n + 1, 2)  # others vanish by symmetry
    weighted = values[:, tests] * (weights * values[:, n])[:, None]
    coefficients = np.zeros(n + 2)
    coefficients[n + 1] = 1
    coefficients[basis] = np.linalg.lstsq(weighted.T @ values[:, basis], -weighted.T @ values[:, n + 1], rcond=None)[0]
    return coefficients


def _between(nodes: Array, coefficients: Array) -> Array:
    """Return the one root in every interval between nodes and the ends of (-1, 1), by bisection to the last bit."""
    low, high = np.concatenate([[-1.0], nodes]), np.concatenate([nodes, [1.0]])
    sign = np.sign(legendre.legval(low, coefficients))
    for _ in range(60):
        middle = (low + high) / 2
        same = np.sign(legendre.legval(middle, coefficients)) == sign
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return np.asarray((low + high) / 2)
