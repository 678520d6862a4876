"""DRAGAN: by the formula, in closed form, and what it draws."""

from __future__ import annotations

import pytest
import torch

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.regularizers import DRAGAN
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
def test_equals_the_formula(architecture: Architecture) -> None:
    penalty, model, batch = case_of("DRAGAN", architecture, 1)
    rows = [
        (slope(model, x + 0.5 * noise, lambda z: z.sum()).norm() - 1) ** 2
        for x, noise in zip(batch.inputs, batch.extras["noise"], strict=True)
    ]
    same(penalty(model, batch), sum(rows) / len(rows))


def test_linear_and_quadratic_critics_in_closed_form() -> None:
    critic = linear(1)
    same(DRAGAN(center=2.0)(critic, random(5, 4)), (critic.weight.norm() - 2).square().detach())
    critic, x, noise = Quadratic(), random(5, 4), random(5, 4)
    expected = (((x + 0.1 * noise) @ critic.matrix).norm(dim=1) - 1).square().mean().detach()
    same(DRAGAN(noise=0.1)(critic, gr.Batch(x, extras={"noise": noise})), expected)


def test_standard_normal_noise_from_the_global_stream() -> None:
    critic, x = Quadratic(), random(5, 4)
    torch.manual_seed(3)
    value = DRAGAN()(critic, x)
    torch.manual_seed(3)
    noise = torch.randn(5, 4, dtype=torch.float64)
    same(DRAGAN()(critic, gr.Batch(x, extras={"noise": noise})), value.detach())


@pytest.mark.filterwarnings("ignore::gradreg.ZeroSecondDerivativeWarning")
def test_a_dead_critic() -> None:
    critic = zeroed(PERCEPTRON.model(1))
    value = DRAGAN()(critic, PERCEPTRON.inputs(1))
    same(value, (1 - 1e-6) ** 2)
    finite_gradients(value, critic)


def test_bad_input() -> None:
    with pytest.raises(GradregError, match="noise=-1"):
        DRAGAN(noise=-1)
