"""GradientNorm, exact and by finite differences, against plain autograd, closed forms and SAM."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.model import swapped
from tests.regularizers import models

EVERY = pytest.mark.parametrize("make", models.MODELS.values(), ids=models.MODELS)


def flat_gradient(model: nn.Module, batch: gr.Batch, create_graph: bool = True) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        risk = F.cross_entropy(model(batch.inputs), batch.targets)
    found = torch.autograd.grad(risk, models.parameters(model), create_graph=create_graph)
    return torch.cat([value.flatten() for value in found])


@EVERY
def test_exact_equals_plain_autograd(make) -> None:
    model, batch = make(), models.batch()
    expected = (flat_gradient(model, batch).square().sum() + 1e-12).sqrt()
    models.check_equal(gr.regularizers.GradientNorm()(model, batch), expected, model)
    squared = gr.regularizers.GradientNorm(squared=True)(model, batch)
    models.check_equal(squared, flat_gradient(model, batch).square().sum(), model)


@EVERY
def test_first_and_second_derivative(make) -> None:
    models.check_derivatives(gr.regularizers.GradientNorm(), make(), models.batch())


def test_closed_form_of_a_quadratic() -> None:
    """Of half the squared distance of a bias to the data, the gradient is b - mean(y), and its norm's derivative its sign."""
    model = nn.Linear(1, 2).double()
    model.weight.requires_grad_(False).zero_()
    y = torch.randn(4, 2).double()
    half = gr.loss(lambda outputs, targets: (outputs - targets).square() / 2)
    batch = gr.Batch(torch.zeros(4, 1).double(), y)
    difference = model.bias.detach() - y.mean(0)
    value = gr.regularizers.GradientNorm(of=half, eps=1e-30)(model, batch)
    value.backward()
    torch.testing.assert_close(value.detach(), difference.norm(), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.bias.grad, difference / difference.norm(), rtol=1e-12, atol=0)
    # finite differences of a quadratic: |d| + r / 2, and the gradient is exact
    model.zero_grad()
    value = gr.regularizers.FiniteDifferenceGradientNorm(of=half, radius=0.5, eps=1e-30)(model, batch)
    value.backward()
    torch.testing.assert_close(value.detach(), difference.norm() + 0.25, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.bias.grad, difference / difference.norm(), rtol=1e-12, atol=0)


def sam_gradient(model: nn.Module, batch: gr.Batch, radius: float) -> Tensor:
    """g(theta + r g / |g|), by moving the parameters there."""
    gradient = flat_gradient(model, batch, create_graph=False)
    step = (radius * gradient / gradient.norm()).split([p.numel() for p in models.parameters(model)])
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    moved = {
        name: (p.detach() + part.view_as(p)).requires_grad_()
        for (name, p), part in zip(named.items(), step, strict=True)
    }
    with swapped(model, moved):
        risk = F.cross_entropy(model(batch.inputs), batch.targets)
    return torch.cat([value.flatten() for value in torch.autograd.grad(risk, list(moved.values()))])


@EVERY
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_finite_differences_are_the_published_scheme_and_sam(make, alpha) -> None:
    model, batch, radius = make(), models.batch(), 0.05
    penalty = gr.regularizers.FiniteDifferenceGradientNorm(weight=alpha * radius, radius=radius)
    loss, logs = gr.Objective(F.cross_entropy, flat=penalty)(model, batch)
    loss.backward()
    own = torch.cat([p.grad.flatten() for p in models.parameters(model)])
    plain = flat_gradient(model, batch, create_graph=False)
    expected = (1 - alpha) * plain + alpha * sam_gradient(model, batch, radius)
    torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(logs["flat"], penalty(model, batch).detach(), rtol=1e-10, atol=1e-12)


@EVERY
def test_finite_differences_tend_to_the_exact_form(make) -> None:
    model, batch = make(), models.batch()
    exact = gr.regularizers.GradientNorm()(model, batch)
    exact_gradient = torch.autograd.grad(exact, models.parameters(model))
    errors = []
    for radius in (1e-2, 1e-4):
        near = gr.regularizers.FiniteDifferenceGradientNorm(radius=radius)(model, batch)
        found = torch.autograd.grad(near, models.parameters(model))
        errors.append(sum(float((a - b).square().sum()) for a, b in zip(found, exact_gradient, strict=True)) ** 0.5)
        assert abs(float((near - exact).detach())) < 10 * radius
    assert errors[1] < errors[0] / 50
    assert errors[1] < 1e-2


@EVERY
def test_one_forward_in_an_objective(make) -> None:
    model, batch = make(), models.batch()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    objective = gr.Objective(F.cross_entropy, norm=gr.regularizers.GradientNorm())
    objective(model, batch)
    calls.clear()
    loss, logs = objective(model, batch)
    assert len(calls) == 1
    expected = (flat_gradient(model, batch).square().sum() + 1e-12).sqrt()
    torch.testing.assert_close(logs["norm"], expected.detach(), rtol=1e-10, atol=1e-12)
    models.check_equal(loss, F.cross_entropy(model(batch.inputs), batch.targets) + expected, model)


def test_train_mode_batch_norm_is_the_gradient_of_the_batch() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    batch = models.batch()
    expected = (flat_gradient(model, batch).square().sum() + 1e-12).sqrt()
    models.check_equal(gr.regularizers.GradientNorm()(model, batch), expected, model)


def test_heads_are_averaged_as_the_task_is() -> None:
    model, batch = models.shared(), models.batch()
    risk = sum(F.cross_entropy(head(model.base(batch.inputs)), batch.targets) for head in model.heads) / 3
    found = torch.autograd.grad(risk, models.parameters(model), create_graph=True)
    expected = (sum(value.square().sum() for value in found) + 1e-12).sqrt()
    models.check_equal(gr.regularizers.GradientNorm()(model, batch), expected, model)
    near = gr.regularizers.FiniteDifferenceGradientNorm(radius=1e-5)(model, batch)
    torch.testing.assert_close(near, expected, rtol=1e-3, atol=0)


def test_order_and_duplicates_do_not_matter() -> None:
    model, batch = models.mlp(), models.batch()
    for penalty in (gr.regularizers.GradientNorm(), gr.regularizers.FiniteDifferenceGradientNorm()):
        value = penalty(model, batch)
        for other in (batch[torch.randperm(6)], batch[list(range(6)) * 2]):
            torch.testing.assert_close(penalty(model, other), value, rtol=1e-10, atol=1e-13)


def test_a_vanishing_gradient_is_finite() -> None:
    model, batch = models.mlp(), models.batch()
    for parameter in model.parameters():
        parameter.data.zero_()  # two of each class: every gradient is exactly zero
    penalty = gr.regularizers.GradientNorm()
    penalty._first_call = False
    value = penalty(model, batch)
    first = torch.autograd.grad(value, models.parameters(model), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), models.parameters(model), allow_unused=True)
    torch.testing.assert_close(value.detach(), torch.tensor(1e-6, dtype=torch.float64), rtol=1e-3, atol=0)
    assert all(torch.isfinite(g).all() for g in (*first, *(g for g in second if g is not None)))
    difference = gr.regularizers.FiniteDifferenceGradientNorm()
    difference._first_call = False
    assert torch.isfinite(difference(model, batch))


def test_bad_input() -> None:
    for kind in (gr.regularizers.GradientNorm, gr.regularizers.FiniteDifferenceGradientNorm):
        with pytest.raises(GradregError, match="parameters"):
            kind(wrt=gr.Features())
        with pytest.raises(GradregError, match="eps"):
            kind(eps=0.0)
        with pytest.raises(GradregError, match="needs targets"):
            kind()(models.mlp(), models.batch().inputs)
    for radius in (0, -1.0, float("nan"), "small"):
        with pytest.raises(GradregError, match="radius"):
            gr.regularizers.FiniteDifferenceGradientNorm(radius=radius)
