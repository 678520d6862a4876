"""GradientMatching against loops over classes, tensors and rows; the gradient reaches the data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import gradreg as gr
from gradreg.errors import BatchError, GradregError
from tests.regularizers import models

EVERY = pytest.mark.parametrize("make", models.MODELS.values(), ids=models.MODELS)


def data() -> tuple[gr.Batch, gr.Batch]:
    """Three synthetic examples of two classes that require grad, and nine real ones of three."""
    synthetic = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    real = torch.randn(9, 6, dtype=torch.float64)
    return gr.Batch(synthetic, torch.tensor([0, 2, 0])), gr.Batch(real, torch.arange(9) % 3)


def of_class(model: nn.Module, batch: gr.Batch, label: int | None, create_graph: bool) -> list[Tensor]:
    chosen = torch.ones(len(batch), dtype=torch.bool) if label is None else batch.targets == label
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        risk = F.cross_entropy(model(batch.inputs[chosen]), batch.targets[chosen])
    return list(torch.autograd.grad(risk, models.parameters(model), create_graph=create_graph))


def distance(ours: list[Tensor], theirs: list[Tensor], kind: str) -> Tensor:
    if kind == "squared":
        return sum((a - b).square().sum() for a, b in zip(ours, theirs, strict=True))
    if kind == "cosine":
        a, b = (torch.cat([value.flatten() for value in values]) for values in (ours, theirs))
        return 1 - (a * b).sum() / ((a * a).sum() + 1e-12).sqrt() / ((b * b).sum() + 1e-12).sqrt()
    total = 0.0
    for a, b in zip(ours, theirs, strict=True):
        for row, other in zip(a.flatten(1), b.flatten(1), strict=True) if a.dim() > 1 else ():
            norms = ((row * row).sum() + 1e-12).sqrt() * ((other * other).sum() + 1e-12).sqrt()
            total = total + 1 - (row * other).sum() / norms
    return total


@EVERY
@pytest.mark.parametrize("kind", gr.penalties.MATCHINGS)
@pytest.mark.parametrize("by_class", [True, False], ids=["by_class", "together"])
def test_equals_loops_and_reaches_the_data(make, kind, by_class) -> None:
    model, (synthetic, real) = make(), data()
    penalty = gr.regularizers.GradientMatching(real=real, distance=kind, by_class=by_class)
    expected = sum(
        distance(of_class(model, synthetic, label, True), of_class(model, real, label, False), kind)
        for label in ((0, 2) if by_class else (None,))
    )
    value = penalty(model, synthetic)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-11)
    (own,) = torch.autograd.grad(value, synthetic.inputs)
    (other,) = torch.autograd.grad(expected, synthetic.inputs)
    torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-10)
    assert own.abs().sum() > 0


@pytest.mark.parametrize("glob", ["*", "0.weight"])
def test_rows_from_factors_are_the_same(monkeypatch, glob) -> None:
    model, (synthetic, real) = models.mlp(), data()
    results = []
    for short in (True, False):
        monkeypatch.setattr(gr.regularizers.GradientMatching, "_worthwhile", lambda *_, short=short: short)
        penalty = gr.regularizers.GradientMatching(real=real, wrt=gr.Params(glob))
        value = penalty(model, synthetic)
        wanted = [synthetic.inputs, *models.parameters(model)]
        results.append((value, torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)))
        if short:
            images = synthetic.inputs
            assert gradcheck(lambda x, p=penalty: p(model, gr.Batch(x, synthetic.targets)), images, fast_mode=True)
            assert gradgradcheck(lambda x, p=penalty: p(model, gr.Batch(x, synthetic.targets)), images, fast_mode=True)
            assert penalty._from_factors(model, synthetic, real) is not None
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


@EVERY
def test_first_and_second_derivative_with_respect_to_the_data(make) -> None:
    model, (synthetic, real) = make(), data()
    penalty = gr.regularizers.GradientMatching(real=real, eps=1e-6)

    def value(images: Tensor) -> Tensor:
        return penalty(model, gr.Batch(images, synthetic.targets))

    assert gradcheck(value, synthetic.inputs, fast_mode=True)
    assert gradgradcheck(value, synthetic.inputs, fast_mode=True)


def test_closed_form_of_a_linear_model() -> None:
    """Of w·x and half the squared error at w = 0, gradients are -E[y x]; matching them by squares is a distance of moments."""
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data.zero_()
    half = gr.loss(lambda outputs, targets: (outputs - targets).square() / 2)
    images = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    y, x_real, y_real = torch.tensor([[1.0], [-1.0]]).double(), torch.randn(5, 2).double(), torch.randn(5, 1).double()
    penalty = gr.regularizers.GradientMatching(real=(x_real, y_real), of=half, distance="squared", by_class=False)
    difference = (y * images.detach()).mean(0) - (y_real * x_real).mean(0)
    value = penalty(model, (images, y))
    value.backward()
    torch.testing.assert_close(value.detach(), difference.square().sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(images.grad, 2 * difference * y / 2, rtol=1e-12, atol=1e-14)


def test_descent_on_the_images_matches() -> None:
    model, (synthetic, real) = models.mlp(), data()
    penalty = gr.regularizers.GradientMatching(real=lambda: real)
    optimizer = torch.optim.Adam([synthetic.inputs], lr=0.1)
    before = float(penalty(model, synthetic).detach())
    for _ in range(30):
        optimizer.zero_grad()
        penalty(model, synthetic).backward()
        optimizer.step()
    assert float(penalty(model, synthetic).detach()) < 0.5 * before


def test_equal_data_match() -> None:
    model, real = models.mlp(), models.batch()
    images = real.inputs.clone().requires_grad_()
    penalty = gr.regularizers.GradientMatching(real=real)
    penalty._first_call = False  # at a minimum nothing is sent to the parameters
    value = penalty(model, gr.Batch(images, real.targets))
    value.backward()
    assert float(value.detach()) < 1e-7
    assert torch.isfinite(images.grad).all()


def test_vanishing_gradients_are_finite() -> None:
    model, (synthetic, real) = models.mlp(), data()
    for parameter in model.parameters():
        parameter.data.zero_()
    penalty = gr.regularizers.GradientMatching(real=real)
    penalty._first_call = False  # at this point nothing is sent to the parameters
    penalty(model, synthetic).backward()
    assert torch.isfinite(synthetic.inputs.grad).all()


def test_order_and_heads() -> None:
    model, (synthetic, real) = models.shared(), data()
    value = gr.regularizers.GradientMatching(real=real[torch.randperm(9)])(model, synthetic)
    expected = 0.0
    for label in (0, 2):
        sides = []
        for batch, graph in ((synthetic, True), (real, False)):
            chosen = batch[batch.targets == label]
            outputs = model(chosen.inputs)
            risk = sum(F.cross_entropy(outputs[:, k], chosen.targets) for k in range(3)) / 3
            sides.append(list(torch.autograd.grad(risk, models.parameters(model), create_graph=graph)))
        expected = expected + distance(*sides, "cosine_rows")
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-11)


def test_bad_input() -> None:
    model, (synthetic, real) = models.mlp(), data()
    matching = gr.regularizers.GradientMatching
    with pytest.raises(GradregError, match="none requires grad"):
        matching(real=real)(model, real)
    with pytest.raises(GradregError, match="no real data"):
        matching()(model, synthetic)
    with pytest.raises(BatchError, match="no example of class 2"):
        matching(real=real[real.targets != 2])(model, synthetic)
    with pytest.raises(BatchError, match="integer labels"):
        matching(real=(real.inputs, real.inputs))(model, synthetic)
    with pytest.raises(GradregError, match="cosine_rows"):
        matching(distance="cosin")
    with pytest.raises(GradregError, match="different parameters"):
        gr.penalties.gradient_distance({"a": torch.ones(2, 2)}, {"b": torch.ones(2, 2)})
    with pytest.raises(GradregError, match="one axis"):
        gr.penalties.gradient_distance({"a": torch.ones(2)}, {"a": torch.ones(2)})
