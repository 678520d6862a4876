"""JacobianNorm: exact and by projections, its variances, and what it draws."""

from __future__ import annotations

import itertools

import pytest
import torch

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.regularizers import JacobianNorm
from tests.point_cases import PERCEPTRON, Architecture, heads
from tests.regularizers.naive import EVERY_ARCHITECTURE, case_of, finite_gradients, linear, random, same, slope, zeroed


@EVERY_ARCHITECTURE
def test_equals_the_formula(architecture: Architecture) -> None:
    penalty, model, batch = case_of("JacobianNorm", architecture)
    rows = [slope(model, x, lambda z, c=c: z[c]).square().sum() for x in batch.inputs for c in range(3)]
    same(penalty(model, batch), sum(rows) / 2 / len(batch))


@EVERY_ARCHITECTURE
def test_projections_equal_the_formula(architecture: Architecture) -> None:
    penalty, model, batch = case_of("JacobianNorm-projections", architecture)
    v = batch.extras["projections"]
    rows = [
        slope(model, batch.inputs[i], lambda z, i=i, p=p: z @ v[i, p]).square().sum()
        for i in range(len(batch))
        for p in range(2)
    ]
    same(penalty(model, batch), sum(rows) / 4 / len(batch))


def test_a_linear_model_in_closed_form() -> None:
    model, x, v = linear(), random(5, 4), random(5, 1, 3)
    same(JacobianNorm()(model, x), model.weight.square().sum() / 2)
    batch = gr.Batch(x, extras={"projections": v})
    same(JacobianNorm(projections=1)(model, batch), (v[:, 0] @ model.weight).square().sum(1).mean() / 2)


def test_all_sign_vectors_give_mean_and_variance_exactly() -> None:
    model = linear()
    A = (model.weight @ model.weight.T).detach()
    v = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=3)), dtype=torch.float64).unsqueeze(1)
    batch = gr.Batch(random(8, 4), extras={"projections": v})
    halves = JacobianNorm(projections=1).estimate(model, batch, None).detach() / 2
    same(halves.mean(), model.weight.square().sum().detach() / 2)
    same(halves.var(correction=0), (A.square().sum() - A.diagonal().square().sum()) / 2)


@pytest.mark.parametrize("distribution", ["sphere", "gaussian", "rademacher"])
def test_the_stated_variance(distribution: str) -> None:
    model, n, C = linear(4), 40_000, 4
    A = (model.weight @ model.weight.T).detach()
    expected = {
        "gaussian": A.square().sum() / 2,
        "rademacher": (A.square().sum() - A.diagonal().square().sum()) / 2,
        "sphere": C / (C + 2) * (A.square().sum() - A.trace() ** 2 / C) / 2,
    }[distribution]
    penalty = JacobianNorm(projections=1, distribution=distribution)
    halves = penalty.estimate(model, gr.Batch(random(n, 4)), None).detach() / 2
    torch.testing.assert_close(halves.mean(), A.trace() / 2, rtol=0.05, atol=0)
    torch.testing.assert_close(halves.var(), expected, rtol=0.1, atol=0)
    penalty = JacobianNorm(projections=4, distribution=distribution)
    quarters = penalty.estimate(model, gr.Batch(random(n // 4, 4)), None).detach() / 2
    torch.testing.assert_close(quarters.var(), expected / 4, rtol=0.15, atol=0)


def test_vectors_are_drawn_anew_from_the_global_stream() -> None:
    model, x = PERCEPTRON.model(), PERCEPTRON.inputs()
    penalty = JacobianNorm(projections=1)
    torch.manual_seed(1)
    first, second = penalty(model, x), penalty(model, x)
    assert first != second
    torch.manual_seed(1)
    assert torch.equal(penalty(model, x), first)
    torch.manual_seed(1)
    _, logs = gr.Objective(None, jacobian=penalty)(model, x)
    same(logs["jacobian"], first.detach())


def test_images_as_outputs_and_heads() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Unflatten(1, (2, 2, 2))).double()
    x = random(3, 4)
    exact = JacobianNorm()(net, x)
    basis = torch.eye(8, dtype=torch.float64).reshape(8, 2, 2, 2).expand(3, 8, 2, 2, 2)
    batch = gr.Batch(x, extras={"projections": basis})
    same(JacobianNorm(projections=8)(net, batch) * 8, exact.detach())
    model = heads()
    each = [JacobianNorm()(torch.nn.Sequential(model.base, head), x).detach() for head in model.heads]
    same(JacobianNorm()(model, x), torch.stack(each).mean())


@pytest.mark.filterwarnings("ignore::gradreg.ZeroSecondDerivativeWarning")
def test_zero_gradients_are_finite() -> None:
    model = zeroed(PERCEPTRON.model())
    for penalty in (JacobianNorm(), JacobianNorm(projections=2)):
        value = penalty(model, PERCEPTRON.inputs(1))
        assert value == 0
        finite_gradients(value, model)


def test_bad_input() -> None:
    with pytest.raises(GradregError, match="projections=0"):
        JacobianNorm(projections=0)
    with pytest.raises(GradregError, match="rademacher"):
        JacobianNorm(distribution="signs")
    with pytest.raises(GradregError, match=r"expected \(5, 2, 3\)"):
        JacobianNorm(projections=2)(linear(), gr.Batch(random(5, 4), extras={"projections": random(5, 3)}))
