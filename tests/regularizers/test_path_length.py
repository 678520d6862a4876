"""PathLength: by the formula, its running mean, and what it draws."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.regularizers import PathLength
from tests.point_cases import PERCEPTRON, Architecture
from tests.regularizers.naive import EVERY_ARCHITECTURE, case_of, finite_gradients, linear, random, same, slope, zeroed


@EVERY_ARCHITECTURE
def test_equals_the_formula(architecture: Architecture) -> None:
    penalty, model, batch = case_of("PathLength", architecture)
    penalty.mean_length.fill_(0.3)
    y = batch.extras["projections"]
    gradients = [slope(model, x, lambda z, i=i: z @ y[i]) for i, x in enumerate(batch.inputs)]
    lengths = torch.stack([(g.square().sum() + 1e-12).sqrt() for g in gradients])
    a = 0.3 + 0.01 * (lengths.mean() - 0.3)
    penalty.double()
    penalty.mean_length.fill_(0.3)
    same(penalty(model, batch), (lengths - a).square().mean())


def test_a_linear_generator_in_closed_form() -> None:
    model, y = linear(), random(5, 3)
    batch = gr.Batch(random(5, 4), extras={"projections": y})
    lengths = (y @ model.weight).norm(dim=1).detach()
    same(PathLength(decay=1.0)(model, batch), lengths.var(correction=0))


def test_the_average_moves_in_update_only() -> None:
    model, penalty = linear(), PathLength(decay=0.5).double()
    batch = gr.Batch(random(5, 4), extras={"projections": random(5, 3)})
    mean = penalty.lengths(model, batch).mean().detach()
    penalty(model, batch)
    penalty(model, batch)
    assert penalty.mean_length == 0
    objective = gr.Objective(None, paths=penalty)
    objective(model, batch)
    same(penalty.mean_length, mean / 2)
    objective(model, batch)
    same(penalty.mean_length, mean * 3 / 4)
    objective.eval()
    objective(model, batch)
    same(penalty.mean_length, mean * 3 / 4)
    other = gr.Objective(None, paths=PathLength(decay=0.5).double())
    other.load_state_dict(objective.state_dict())
    assert other.regularizers["paths"].mean_length == penalty.mean_length


def test_the_average_carries_graph_or_not() -> None:
    model, y = linear(), random(5, 3)
    batch = gr.Batch(random(5, 4), extras={"projections": y})

    def gradient(attached: bool) -> torch.Tensor:
        value = PathLength(decay=0.5, attached=attached).double()(model, batch)
        return torch.autograd.grad(value, model.weight)[0]

    lengths = (y @ model.weight).norm(dim=1)
    average = lengths.mean() / 2
    for attached, a in ((True, average), (False, average.detach())):
        (expected,) = torch.autograd.grad((lengths - a).square().mean(), model.weight, retain_graph=True)
        torch.testing.assert_close(gradient(attached), expected)


def test_images_are_scaled_by_their_pixels() -> None:
    net = nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (3, 2, 2))).double()
    x, penalty = random(5, 4), PathLength()
    torch.manual_seed(3)
    lengths = penalty.lengths(net, gr.Batch(x))
    torch.manual_seed(3)
    y = torch.randn(5, 3, 2, 2, dtype=torch.float64) / 2
    same(lengths, (y.flatten(1) @ net[0].weight).norm(dim=1).detach())


def test_layers_are_averaged() -> None:
    class Synthesis(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(random(2, 4, 3))

        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return torch.einsum("nld,ldo->no", w.tanh(), self.weight)

    net, w, y = Synthesis(), random(5, 2, 4), random(5, 3)
    batch = gr.Batch(w, extras={"projections": y})
    g = torch.stack([slope(net, one, lambda z, i=i: z @ y[i]) for i, one in enumerate(w)])
    same(PathLength(layers=True).lengths(net, batch), g.square().sum(2).mean(1).sqrt())
    with pytest.raises(GradregError, match=r"\[n, layers, d\]"):
        PathLength(layers=True)(linear(), gr.Batch(random(5, 4), extras={"projections": y}))


def test_the_output_of_a_mapping_network() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = random(5, 4), random(5, 3)
    w = net[:2](x).detach()
    batch = gr.Batch(x, extras={"projections": y})
    found = PathLength(wrt=gr.Activations("1")).lengths(net, batch)
    same(found, PathLength().lengths(net[2:], gr.Batch(w, extras={"projections": y})).detach())


@pytest.mark.filterwarnings("ignore::gradreg.ZeroSecondDerivativeWarning")
def test_a_dead_generator() -> None:
    model = zeroed(PERCEPTRON.model())
    value = PathLength().double()(model, PERCEPTRON.inputs(1))
    finite_gradients(value, model)


def test_bad_input() -> None:
    with pytest.raises(GradregError, match="decay=0"):
        PathLength(decay=0)
    with pytest.raises(GradregError, match=r"extras\['projections'\] has shape"):
        PathLength()(linear(), gr.Batch(random(5, 4), extras={"projections": random(5, 2)}))
