"""CURE: by the formula, in closed form, with dropout and with ReLU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.regularizers import CURE
from tests.point_cases import PERCEPTRON, Architecture
from tests.regularizers.naive import (
    EVERY_ARCHITECTURE,
    Quadratic,
    case_of,
    finite_gradients,
    random,
    same,
    slope,
    zeroed,
)


@EVERY_ARCHITECTURE
def test_equals_the_formula(architecture: Architecture) -> None:
    penalty, model, batch = case_of("CURE", architecture)
    rows = []
    for x, y in zip(batch.inputs, batch.targets, strict=True):
        loss = lambda z, y=y: -F.log_softmax(z, 0)[y]
        g = slope(model, x, loss)
        z = g.sign() / (g.sign().square().sum() + 1e-12).sqrt()
        rows.append((slope(model, x + 1.5 * z, loss) - g).square().sum())
    same(penalty(model, batch), sum(rows) / len(rows))


def test_a_quadratic_in_closed_form() -> None:
    model, x = Quadratic(), random(5, 4)
    z = (x @ model.matrix).sign() / 2
    same(CURE(h=0.7, of=gr.logit(0))(model, x), (0.7 * z @ model.matrix).square().sum(1).mean().detach())
    direction = random(5, 4)
    batch = gr.Batch(x, extras={"direction": direction})
    same(CURE(h=0.7, of=gr.logit(0))(model, batch), (0.7 * direction @ model.matrix).square().sum(1).mean().detach())


def test_it_works_with_relu() -> None:
    model = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3)).double()
    value = CURE()(model, (random(8, 4), torch.randint(0, 3, (8,))))
    value.backward()
    assert value > 0
    assert all(p.grad.abs().sum() > 0 for p in (model[0].weight, model[2].weight))


def test_dropout_is_the_same_at_both_points() -> None:
    """Otherwise masks would pass for curvature: this model is linear for every mask."""
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 1)).double()
    objective = gr.Objective(None, bend=CURE(of=gr.logit(0)))
    with pytest.warns(gr.ZeroSecondDerivativeWarning):
        _, logs = objective(model, random(3, 4))
    assert logs["bend"] < 1e-20


@pytest.mark.filterwarnings("ignore::gradreg.ZeroSecondDerivativeWarning")
def test_a_dead_model_and_a_single_example() -> None:
    model = zeroed(PERCEPTRON.model())
    value = CURE()(model, (PERCEPTRON.inputs(1), torch.tensor([0])))
    assert value == 0
    finite_gradients(value, model)


def test_bad_input() -> None:
    with pytest.raises(GradregError, match="h=0"):
        CURE(h=0)
