"""HessianPenalty: by the formula, in closed form, difference against derivative."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import gradreg as gr
from gradreg.errors import BatchError, GradregError
from gradreg.regularizers import HessianPenalty
from tests.point_cases import PERCEPTRON, Architecture
from tests.regularizers.naive import EVERY_ARCHITECTURE, Quadratic, case_of, finite_gradients, random, same, zeroed


@EVERY_ARCHITECTURE
def test_equals_the_formula(architecture: Architecture) -> None:
    penalty, model, batch = case_of("HessianPenalty", architecture)
    rows = []
    for x, vectors in zip(batch.inputs, batch.extras["directions"], strict=True):
        center = model(x[None])[0]
        seconds = [
            (sum(model((x + s * 0.1 * v).unsqueeze(0))[0] for s in (1, -1)) - 2 * center) / 0.01 for v in vectors
        ]
        rows.append(torch.stack(seconds).var(0).max())
    torch.testing.assert_close(penalty(model, batch), sum(rows) / len(rows), rtol=1e-9, atol=1e-12)


def test_the_exact_form_is_that_of_the_hessian() -> None:
    model, x = PERCEPTRON.model(), PERCEPTRON.inputs()
    v = torch.randn(3, 4, 4, dtype=torch.float64).sign()
    rows = []
    for one, vectors in zip(x, v, strict=True):
        hessians = [torch.autograd.functional.hessian(lambda p, c=c: model(p[None])[0, c], one) for c in range(3)]
        rows.append(torch.stack([torch.einsum("ka,ab,kb->k", vectors, H, vectors).var() for H in hessians]))
    batch = gr.Batch(x, extras={"directions": v})
    same(HessianPenalty(exact=True)(model, batch), torch.stack(rows).amax(1).mean())
    same(HessianPenalty(exact=True, reduction="mean")(model, batch), torch.stack(rows).mean())
    fine = HessianPenalty(epsilon=1e-3)(model, batch)
    torch.testing.assert_close(fine, HessianPenalty(exact=True)(model, batch), rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("exact", [False, True])
def test_a_quadratic_in_closed_form(exact: bool) -> None:
    """All sign vectors of four latents: the variance is twice the sum of the squared entries off the diagonal."""
    model = Quadratic()
    v = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=4)), dtype=torch.float64).expand(5, 16, 4)
    batch = gr.Batch(random(5, 4), extras={"directions": v})
    A = model.matrix.detach()
    off = A.square().sum() - A.diagonal().square().sum()
    value = HessianPenalty(exact=exact)(model, batch)
    torch.testing.assert_close(value.detach(), 2 * off * 16 / 15, rtol=1e-9, atol=0)


def test_a_diagonal_hessian_costs_nothing() -> None:
    model = Quadratic()
    with torch.no_grad():
        model.root.copy_(torch.diag(random(4)))
    value = HessianPenalty(directions=4)(model, random(5, 4))
    assert value < 1e-18


def test_orders_are_declared() -> None:
    assert HessianPenalty().order == 1
    assert HessianPenalty(exact=True).order == 3


def test_dropout_is_the_same_at_all_points() -> None:
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 1)).double()
    value = HessianPenalty()(model, random(3, 4))
    assert value < 1e-16


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(5), nn.GroupNorm(1, 5), nn.BatchNorm1d(5).eval()], ids=["layer", "group", "batch"]
)
def test_the_third_derivative_through_normalizations(norm: nn.Module) -> None:
    """The gradient of the exact penalty, against finite differences of its value."""
    model = nn.Sequential(nn.Linear(3, 5), norm, nn.Tanh(), nn.Linear(5, 2)).double()
    batch = gr.Batch(random(3, 3), extras={"directions": torch.randn(3, 3, 3, dtype=torch.float64).sign()})
    penalty = HessianPenalty(exact=True, reduction="mean")
    weight, direction, step = model[0].weight, random(5, 3), 1e-5
    (gradient,) = torch.autograd.grad(penalty(model, batch), weight)
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(direction, alpha=sign * step)
        sides.append(penalty(model, batch).detach())
        with torch.no_grad():
            weight.sub_(direction, alpha=sign * step)
    torch.testing.assert_close((gradient * direction).sum(), (sides[0] - sides[1]) / (2 * step), rtol=1e-5, atol=1e-8)


def test_batch_norm_in_train_mode_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()
    with pytest.raises(gr.errors.CoupledExamplesError, match="BatchNorm"):
        HessianPenalty(exact=True)(model, random(3, 3))


@pytest.mark.filterwarnings("ignore::gradreg.ZeroSecondDerivativeWarning")
def test_a_dead_generator_and_a_single_example() -> None:
    model = zeroed(PERCEPTRON.model())
    for exact in (False, True):
        value = HessianPenalty(exact=exact)(model, PERCEPTRON.inputs(1))
        assert value == 0
        finite_gradients(value, model)


def test_bad_input() -> None:
    with pytest.raises(GradregError, match="directions=1"):
        HessianPenalty(directions=1)
    with pytest.raises(GradregError, match="epsilon=0"):
        HessianPenalty(epsilon=0)
    with pytest.raises(GradregError, match="reduction"):
        HessianPenalty(reduction="sum")
    with pytest.raises(BatchError, match="at least 2"):
        HessianPenalty()(Quadratic(), gr.Batch(random(5, 4), extras={"directions": random(5, 1, 4)}))
    with pytest.raises(BatchError, match=r"expected \(5, 3, 4\)"):
        HessianPenalty()(Quadratic(), gr.Batch(random(5, 4), extras={"directions": random(5, 3, 2)}))
