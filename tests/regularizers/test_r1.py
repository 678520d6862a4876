"""R1, R2 and their factor; R1 applied lazily."""

from __future__ import annotations

import pytest
import torch

import gradreg as gr
from gradreg.errors import BatchError
from gradreg.regularizers import R1, R2
from tests.point_cases import PERCEPTRON, Architecture
from tests.regularizers.naive import (
    EVERY_ARCHITECTURE,
    Quadratic,
    case_of,
    finite_gradients,
    linear,
    random,
    same,
    slope,
    zeroed,
)


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("name", ["R1", "R2"])
def test_equals_the_formula(name: str, architecture: Architecture) -> None:
    penalty, model, batch = case_of(name, architecture, 1)
    points = batch.inputs if name == "R1" else batch.extras["fake"]
    rows = [slope(model, x, lambda z: z.sum()).square().sum() / 2 for x in points]
    same(penalty(model, batch), sum(rows) / len(rows))


def test_linear_and_quadratic_critics_in_closed_form() -> None:
    x, fake = random(5, 4), random(5, 4)
    critic = linear(1)
    same(R1()(critic, x), critic.weight.square().sum().detach() / 2)
    critic = Quadratic()
    same(R1()(critic, x), ((x @ critic.matrix).square().sum(1) / 2).mean().detach())
    same(R2()(critic, gr.Batch(x, extras={"fake": fake})), ((fake @ critic.matrix).square().sum(1) / 2).mean().detach())


def test_lazily_every_k_steps_times_k() -> None:
    """Over k steps, the lazy weight adds what the plain one does, and costs one penalty instead of k."""
    critic, x = Quadratic(), random(5, 4)
    lazy = gr.Objective(None, r1=R1(weight=gr.schedules.Every(4, weight=10.0)))
    plain = gr.Objective(None, r1=R1(weight=10.0))
    steps = [lazy(critic, x) for _ in range(8)]
    sums = [float(loss.detach()) for loss, _ in steps]
    assert [logs["r1/weight"] for _, logs in steps] == [40.0, 0, 0, 0, 40.0, 0, 0, 0]
    assert ["r1" in logs for _, logs in steps] == [True, False, False, False, True, False, False, False]
    torch.testing.assert_close(sum(sums), sum(float(plain(critic, x)[0].detach()) for _ in range(8)))
    torch.testing.assert_close(sums[0], 40 * float(R1()(critic, x).detach()))


def test_lazily_on_top_of_a_schedule() -> None:
    weight = gr.schedules.Every(2, weight=gr.schedules.WarmUp(1.0, steps=4))
    assert [weight(step) for step in range(6)] == [0.0, 0.0, 1.0, 0.0, 2.0, 0.0]


@pytest.mark.filterwarnings("ignore::gradreg.ZeroSecondDerivativeWarning")
def test_a_dead_critic() -> None:
    critic = zeroed(PERCEPTRON.model(1))
    value = R1()(critic, PERCEPTRON.inputs(1))
    assert value == 0
    finite_gradients(value, critic)


def test_bad_input() -> None:
    with pytest.raises(BatchError, match=r"extras\['fake'\] is needed: R2 needs generated data"):
        R2()(Quadratic(), random(5, 4))
