"""LocalLinearity: by the formula, in closed form, and its maximization."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradreg as gr
from gradreg.errors import GradregError, ScalarError
from gradreg.regularizers import LocalLinearity, local_linearity
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
    penalty, model, batch = case_of("LocalLinearity", architecture)
    rows = []
    for x, y, delta in zip(batch.inputs, batch.targets, batch.extras["delta"], strict=True):
        loss = lambda z, y=y: -F.log_softmax(z, 0)[y]
        along = (slope(model, x, loss) * delta).sum()
        rise = loss(model((x + delta).unsqueeze(0))[0]) - loss(model(x.unsqueeze(0))[0])
        rows.append((rise - along).abs() + 0.75 * along.abs())
    same(penalty(model, batch), (sum(rows) / len(rows)).detach())


def test_a_quadratic_in_closed_form() -> None:
    model, x, delta = Quadratic(), random(5, 4), random(5, 4)
    batch = gr.Batch(x, extras={"delta": delta})
    bend, along = (delta @ model.matrix * delta).sum(1) / 2, (delta @ model.matrix * x).sum(1)
    for slope_weight in (0.0, 2.0):
        value = LocalLinearity(slope=slope_weight, of=gr.logit(0))(model, batch)
        same(value, (bend.abs() + slope_weight * along.abs()).mean().detach())


def test_the_maximizer_is_found() -> None:
    """Of a definite quadratic the deviation is largest in a corner of the cube."""
    model = Quadratic()
    root = random(4, 4)
    with torch.no_grad():
        model.root.copy_(root @ root.T)
    corners = 0.1 * torch.tensor(list(itertools.product([-1.0, 1.0], repeat=4)), dtype=torch.float64)
    best = (corners @ model.matrix * corners).sum(1).max().detach() / 2
    x = random(1, 4).expand(30, 4)
    penalty = LocalLinearity(radius=0.1, slope=0.0, steps=20, of=gr.logit(0))
    here = model(x).squeeze(1).detach()
    delta = penalty.maximizer(model, gr.Batch(x), here, (x @ model.matrix).detach())
    found = ((delta @ model.matrix * delta).sum(1) / 2).detach()
    assert delta.abs().max() <= 0.1
    assert found.max() <= best + 1e-12
    same(found.max(), best)  # from some of thirty starts
    assert found.mean() > 0.7 * best


def test_the_maximization_builds_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = []
    original = local_linearity.values_and_gradients

    def spy(*args: object, **kwargs: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        result = original(*args, **kwargs)
        flags.append(
            (kwargs.get("differentiable", False), any(t.requires_grad for t in (result[0], *result[1].values())))
        )
        return result

    monkeypatch.setattr(local_linearity, "values_and_gradients", spy)
    values = []
    points = local_linearity.point_values
    monkeypatch.setattr(local_linearity, "point_values", lambda *a, **k: values.append(points(*a, **k)) or values[-1])
    batch = (PERCEPTRON.inputs(), torch.tensor([0, 1, 2]))
    LocalLinearity(steps=3)(PERCEPTRON.model(), batch).backward()
    assert flags == [(False, False)] * 3
    assert [value.requires_grad for value in values] == [True, True]  # the losses at the inputs and at the maximizer


def test_the_start_from_the_global_stream() -> None:
    model, x, y = PERCEPTRON.model(), PERCEPTRON.inputs(), torch.tensor([0, 1, 2])
    penalty = LocalLinearity(radius=0.2, steps=1)
    torch.manual_seed(3)
    value = penalty(model, (x, y))
    torch.manual_seed(3)
    start = (2 * torch.rand(3, 4, dtype=torch.float64) - 1) * 0.2
    same(penalty(model, gr.Batch(x, y, extras={"start": start})), value.detach())


def test_dropout_is_the_same_in_both_losses() -> None:
    """Otherwise the noise of the masks would pass for curvature: this model is linear for every mask."""
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 1)).double()
    batch = gr.Batch(random(3, 4), extras={"delta": 0.1 * random(3, 4)})
    objective = gr.Objective(None, bend=LocalLinearity(slope=0.0, of=gr.logit(0)))
    _, logs = objective(model, batch)
    assert logs["bend"] < 1e-12


@pytest.mark.filterwarnings("ignore::gradreg.ZeroSecondDerivativeWarning")
def test_a_dead_model_and_a_single_example() -> None:
    model = zeroed(PERCEPTRON.model())
    value = LocalLinearity(steps=2)(model, (PERCEPTRON.inputs(1), torch.tensor([0])))
    assert value < 1e-12
    finite_gradients(value, model)


def test_bad_input() -> None:
    with pytest.raises(GradregError, match="radius=0"):
        LocalLinearity(radius=0)
    with pytest.raises(GradregError, match="steps=0"):
        LocalLinearity(steps=0)
    with pytest.raises(ScalarError, match="one loss per example"):
        LocalLinearity(of=gr.all_logits())(PERCEPTRON.model(), PERCEPTRON.inputs())
