"""`metric=` of every penalty: a metric M = A Aᵀ at x = A z is the plain penalty of the model seen as a function of z."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from tests.point_cases import PERCEPTRON
from tests.regularizers.naive import random, same

R = gr.regularizers
Extras = dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]]


def point(value: Tensor, A: Tensor) -> Tensor:
    """A point or a displacement in coordinates z."""
    return value @ torch.linalg.inv(A).T


def gradient(value: Tensor, A: Tensor) -> Tensor:
    """A gradient with respect to z."""
    return value @ A


def unmoved(value: Tensor, A: Tensor) -> Tensor:
    return value


CASES: dict[str, tuple[Callable[..., gr.Regularizer], Extras]] = {
    "InputGradient": (R.InputGradient, {}),
    "JacobianNorm": (R.JacobianNorm, {}),
    "JacobianNorm, projected": (lambda **o: R.JacobianNorm(projections=2, **o), {"projections": ((3, 2, 3), unmoved)}),
    "ContractivePenalty": (R.ContractivePenalty, {}),
    "R1": (R.R1, {}),
    "R2": (R.R2, {"fake": ((3, 4), point)}),
    "WGANGP": (R.WGANGP, {"fake": ((3, 4), point), "alpha": ((3,), unmoved)}),
    "DRAGAN": (R.DRAGAN, {"noise": ((3, 4), point)}),
    "PathLength": (R.PathLength, {"projections": ((3, 3), unmoved)}),
    "Sobolev": (R.Sobolev, {"derivatives": ((3, 3, 4), gradient)}),
    "CURE": (R.CURE, {"direction": ((3, 4), point)}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_plain_penalty_in_other_coordinates(name: str) -> None:
    make, extras = CASES[name]
    net, A = PERCEPTRON.model(), random(4, 4)
    change = nn.Linear(4, 4, bias=False).double()
    with torch.no_grad():
        change.weight.copy_(A)
    x, y = random(3, 4), torch.tensor([0, 1, 2])
    given = {key: random(*shape) for key, (shape, _) in extras.items()}
    moved = {key: move(given[key], A) for key, (_, move) in extras.items()}
    with_metric = make(metric=gr.penalties.Metric(A))(net, gr.Batch(x, y, extras=given))
    plain = make()(nn.Sequential(change, net), gr.Batch(point(x, A), y, extras=moved))
    torch.testing.assert_close(with_metric, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_identity_changes_nothing(name: str) -> None:
    make, extras = CASES[name]
    net, batch = (
        PERCEPTRON.model(),
        gr.Batch(
            random(3, 4), torch.tensor([0, 1, 2]), extras={key: random(*shape) for key, (shape, _) in extras.items()}
        ),
    )
    same(make(metric=torch.eye(4, dtype=torch.float64))(net, batch), make()(net, batch).detach())


def test_on_the_data_a_penalty_does_not_see_what_lies_off_them() -> None:
    """Data in a plane: a slope off the plane costs nothing under the plane's metric, and all of it without."""
    plane = torch.linalg.qr(random(4, 2)).Q
    features = random(50, 2) @ plane.T
    off = random(4) @ (torch.eye(4, dtype=torch.float64) - plane @ plane.T)
    model = nn.Linear(4, 1).double()
    with torch.no_grad():
        model.weight.copy_(off)
    metric = gr.penalties.Metric.pca(features, rank=2)
    assert R.InputGradient(of=gr.logit(0), metric=metric)(model, features) < 1e-20
    same(R.InputGradient(of=gr.logit(0))(model, features), off.square().sum())
