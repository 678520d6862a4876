"""GradientSupervision: by the formula, in closed form, and where there is no counterfactual."""

from __future__ import annotations

import pytest
import torch

import gradreg as gr
from gradreg.errors import BatchError
from gradreg.regularizers import GradientSupervision
from tests.point_cases import PERCEPTRON, Architecture, heads
from tests.regularizers.naive import EVERY_ARCHITECTURE, case_of, finite_gradients, linear, random, same, slope, zeroed


@EVERY_ARCHITECTURE
def test_equals_the_formula(architecture: Architecture) -> None:
    penalty, model, batch = case_of("GradientSupervision", architecture)
    rows = []
    for x, other, y in zip(batch.inputs, batch.extras["counterfactual"], batch.targets, strict=True):
        g, d = slope(model, x, lambda z, y=y: z[y]), x - other
        rows.append(1 - (g * d).sum() / ((g.square().sum() + 1e-12) * (d.square().sum() + 1e-12)).sqrt())
    same(penalty(model, batch), sum(rows) / len(rows))


def test_a_linear_model_in_closed_form() -> None:
    model, x, y, d = linear(), random(5, 4), torch.tensor([0, 1, 2, 0, 1]), random(5, 4)
    expected = 1 - torch.cosine_similarity(model.weight[y], d).mean()
    same(GradientSupervision()(model, gr.Batch(x, y, extras={"direction": d})), expected.detach())
    same(GradientSupervision()(model, gr.Batch(x, y, extras={"counterfactual": x - d})), expected.detach())


def test_the_metric() -> None:
    model, x, y, d, M = linear(), random(5, 4), torch.tensor([0, 1, 2, 0, 1]), random(5, 4), random(4, 4)
    M = M @ M.T
    w = model.weight.detach()[y]
    dot = lambda a, b: torch.einsum("ni,ij,nj->n", a, M, b)
    expected = 1 - (dot(w, d) / (dot(w, w) * dot(d, d)).sqrt()).mean()
    same(GradientSupervision(metric=M)(model, gr.Batch(x, y, extras={"direction": d})), expected)


def test_features_of_heads() -> None:
    model, x, y, d = heads(), random(3, 4), torch.tensor([0, 1, 2]), random(3, 5)
    h = model.base(x).detach()
    rows = [
        1 - torch.cosine_similarity(slope(head, h[i], lambda z, i=i: z[y[i]]), d[i], dim=0)
        for head in model.heads
        for i in range(3)
    ]
    penalty = GradientSupervision(wrt=gr.Features())
    same(penalty(model, gr.Batch(x, y, extras={"direction": d})), sum(rows) / 9)
    with pytest.raises(BatchError, match=r"extras\['direction'\] is needed"):
        penalty(model, gr.Batch(x, y, extras={"counterfactual": x}))


def test_without_a_counterfactual_the_term_is_one_and_finite() -> None:
    model, x = PERCEPTRON.model(), PERCEPTRON.inputs(2)
    y, d = torch.tensor([0, 1]), torch.zeros(2, 4)
    with pytest.warns(gr.ZeroSecondDerivativeWarning):
        value = GradientSupervision()(model, gr.Batch(x, y, extras={"direction": d}))
    same(value, 1.0)
    finite_gradients(value, model)
    dead = zeroed(PERCEPTRON.model())
    value = GradientSupervision()(dead, gr.Batch(x, y, extras={"direction": torch.ones(2, 4)}))
    same(value, 1.0)
    finite_gradients(value, dead)


def test_bad_input() -> None:
    y = torch.tensor([0, 1, 2, 0, 1])
    with pytest.raises(BatchError, match=r"extras\['counterfactual'\] is needed"):
        GradientSupervision()(linear(), (random(5, 4), y))
    with pytest.raises(BatchError, match=r"\(5, 4\)"):
        GradientSupervision()(linear(), gr.Batch(random(5, 4), y, extras={"direction": random(5, 1)}))
