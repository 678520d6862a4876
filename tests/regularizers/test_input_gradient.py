"""InputGradient: by the formula, in closed form, at the edges."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradreg as gr
from gradreg.regularizers import InputGradient
from tests.point_cases import CONVOLUTIONAL, PERCEPTRON, Architecture, heads, metric
from tests.regularizers.naive import EVERY_ARCHITECTURE, case_of, finite_gradients, linear, random, same, slope


@EVERY_ARCHITECTURE
def test_equals_the_formula(architecture: Architecture) -> None:
    penalty, model, batch = case_of("InputGradient", architecture)
    rows = [
        slope(model, x, lambda z, y=y: -F.log_softmax(z, 0)[y]).square().sum()
        for x, y in zip(batch.inputs, batch.targets, strict=True)
    ]
    same(penalty(model, batch), sum(rows) / len(rows))


def test_a_linear_logit_in_closed_form() -> None:
    model = linear()
    value = InputGradient(of=gr.logit(1))(model, random(5, 4))
    same(value, model.weight[1].square().sum())
    value.backward()
    torch.testing.assert_close(model.weight.grad[1], 2 * model.weight[1].detach())


def test_a_squared_error_in_closed_form() -> None:
    model, x, y = linear(1), random(5, 4), random(5, 1)
    error = model(x) - y
    value = InputGradient(of=gr.loss(F.mse_loss))(model, (x, y))
    same(value, (4 * error.square().squeeze(1) * model.weight.square().sum()).mean())


def test_the_metric() -> None:
    net, x, m = PERCEPTRON.model(), PERCEPTRON.inputs(), metric(PERCEPTRON)
    g = torch.stack([slope(net, one, lambda z: z[0]) for one in x])
    M = m.factor @ m.factor.T
    same(InputGradient(of=gr.logit(0), metric=M)(net, x), torch.einsum("ni,ij,nj->n", g, M, g).mean())
    image = CONVOLUTIONAL.inputs()
    images = CONVOLUTIONAL.model()
    g = torch.stack([slope(images, one, lambda z: z[0]).flatten() for one in image])
    m = metric(CONVOLUTIONAL)
    same(InputGradient(of=gr.logit(0), metric=m)(images, image), (g @ m.factor).square().sum(1).mean())


def test_features_and_heads() -> None:
    model, x = heads(), random(3, 4)
    labels = torch.tensor([0, 1, 2])
    expected = []
    for k, head in enumerate(model.heads):
        h = model.base(x).detach().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(head(h), labels, reduction="sum"), h)
        expected.append(g.square().sum(1).mean())
        assert k < 3
    same(InputGradient(wrt=gr.Features())(model, (x, labels)), torch.stack(expected).mean())


def test_confident_examples_are_finite_and_a_logit_still_says_something() -> None:
    model = PERCEPTRON.model()
    with torch.no_grad():
        model[-1].bias[0] = 1e4
    batch = (PERCEPTRON.inputs(), torch.zeros(3, dtype=torch.long))
    with pytest.warns(gr.ZeroSecondDerivativeWarning):
        value = InputGradient()(model, batch)
    assert value == 0
    finite_gradients(value, model)
    assert InputGradient(of=gr.true_logit())(model, batch) > 0


def test_the_shared_forward_serves_it() -> None:
    calls = []

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return super().forward(x)

    model = nn.Sequential(Counted(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    objective = gr.Objective(F.cross_entropy, a=InputGradient(), b=gr.regularizers.JacobianNorm(projections=1))
    batch = (random(6, 4), torch.randint(0, 3, (6,)))
    objective(model, batch)  # the first call also looks at three examples
    calls.clear()
    objective(model, batch)
    assert calls == [6]
