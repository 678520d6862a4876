"""What cannot be right is refused or named, by every penalty on gradients at inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import BatchError, ConstantScoreWarning, DetachedGradientError, DisconnectedWarning, GradregError
from tests.point_cases import PERCEPTRON, POINT_CASES, PointCase

R = gr.regularizers
FIRST = {case.name.partition("-")[0]: case for case in reversed(POINT_CASES)}  # one row per regularizer
EVERY = pytest.mark.parametrize("case", FIRST.values(), ids=list(FIRST))


@EVERY
@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), True, "1"])
def test_weights(case: PointCase, weight: object) -> None:
    with pytest.raises(GradregError, match="weight"):
        getattr(R, case.name.partition("-")[0])(weight)


@EVERY
def test_complex_inputs(case: PointCase) -> None:
    batch = case.batch(PERCEPTRON)
    complex_ = gr.Batch(batch.inputs.to(torch.complex128), batch.targets, extras=batch.extras)
    with pytest.raises(BatchError, match="view_as_real"):
        case.make()(PERCEPTRON.model(), complex_)


@EVERY
def test_unbatched_inputs(case: PointCase) -> None:
    """One example without its axis would be read as several."""
    x = torch.randn(3, dtype=torch.float64)
    extras = {name: value[:, 0] if value.dim() == 2 else value for name, value in case.batch(PERCEPTRON).extras.items()}
    batch = gr.Batch(x, torch.randint(0, 3, (3,)), extras=extras)
    square = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with pytest.raises(GradregError):
        case.make()(square, batch)


class Ignoring(nn.Module):
    """Looks at nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.bias.square().expand(len(x), 3)


@EVERY
def test_a_model_that_ignores_its_inputs(case: PointCase) -> None:
    batch, regularizer = case.batch(PERCEPTRON), case.make()
    differences = isinstance(regularizer, R.HessianPenalty)  # of values only: it sees a zero, as of any linear model
    warning = gr.ZeroSecondDerivativeWarning if differences else DisconnectedWarning
    with warnings.catch_warnings(record=True) as caught, suppress(DetachedGradientError):
        warnings.simplefilter("always")
        regularizer(Ignoring(), batch)
    assert any(isinstance(item.message, warning) for item in caught)


NORMALIZED: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(3, elementwise_affine=False),
    "Softmax": lambda: nn.Softmax(1),
}


@pytest.mark.parametrize("last", NORMALIZED)
@pytest.mark.parametrize("name", ["R1", "R2", "WGANGP", "DRAGAN"])
@pytest.mark.filterwarnings("ignore::gradreg.ZeroSecondDerivativeWarning")
def test_a_critic_whose_outputs_have_a_constant_sum(name: str, last: str) -> None:
    critic = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), NORMALIZED[last]()).double()
    case = FIRST[name]
    with pytest.warns(ConstantScoreWarning, match=rf"{name}: .*last module is 3 \({last}\)"):
        case.make()(critic, case.batch(PERCEPTRON))
    critic.append(nn.Linear(3, 1).double())
    case.make()(critic, case.batch(PERCEPTRON))  # no warning


def test_a_metric_of_another_size() -> None:
    metric = gr.penalties.Metric(torch.eye(3, dtype=torch.float64))
    with pytest.raises(GradregError, match="gradients of 3 entries; these are"):
        R.R1(metric=metric)(PERCEPTRON.model(), PERCEPTRON.inputs())
    two = gr.Batch((torch.randn(3, 4), torch.randn(3, 4)), torch.randint(0, 3, (3,)))
    with pytest.raises(GradregError, match="one thing at a time"):
        R.InputGradient(metric=torch.eye(4))(nn.Bilinear(4, 4, 3), two)
