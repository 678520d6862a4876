"""Fish against a loop over pairs of environments."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import BatchError, GradregError
from tests.regularizers import models

EVERY = pytest.mark.parametrize("make", models.MODELS.values(), ids=models.MODELS)


def naive(model: nn.Module, batch: gr.Batch, similarity: str = "dot") -> Tensor:
    rows = []
    for label in sorted(set(batch.groups.tolist())):
        part = batch[batch.groups == label]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            risk = F.cross_entropy(model(part.inputs), part.targets)
        found = torch.autograd.grad(risk, models.parameters(model), create_graph=True)
        rows.append(torch.cat([value.flatten() for value in found]))
    pairs = list(itertools.combinations(rows, 2))
    if similarity == "dot":
        return -sum((a * b).sum() for a, b in pairs) / len(pairs)
    return -sum((a * b).sum() / (a.norm() * b.norm()) for a, b in pairs) / len(pairs)


@EVERY
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_equals_a_loop(make, similarity) -> None:
    model, batch = make(), models.three_environments()
    # the plain cosine has no eps; gradients here are of norm one
    value, expected = gr.regularizers.Fish(similarity=similarity)(model, batch), naive(model, batch, similarity)
    if similarity == "dot":
        models.check_equal(value, expected, model)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10)


@EVERY
def test_first_and_second_derivative(make) -> None:
    models.check_derivatives(gr.regularizers.Fish(), make(), models.batch())


def test_closed_form_of_a_bias() -> None:
    """Of a constant b and half the squared error, gradients are b - mean(y), so the product is theirs."""
    model = nn.Linear(1, 1).double()
    model.weight.requires_grad_(False).zero_()
    y = torch.tensor([[1.0], [3.0], [-2.0], [-4.0]]).double()
    half = gr.loss(lambda outputs, targets: (outputs - targets).square() / 2)
    batch = gr.Batch(torch.zeros(4, 1).double(), y, groups=torch.tensor([0, 0, 1, 1]))
    b = model.bias.detach()
    expected = -((b - 2) * (b + 3)).squeeze()
    torch.testing.assert_close(gr.regularizers.Fish(of=half)(model, batch), expected, rtol=1e-12, atol=1e-14)


def test_order_names_and_duplicates_do_not_matter() -> None:
    model, batch = models.mlp(), models.three_environments()
    value = gr.regularizers.Fish()(model, batch)
    for other in (batch[torch.randperm(9)], batch[list(range(9)) * 2]):
        torch.testing.assert_close(gr.regularizers.Fish()(model, other), value, rtol=1e-11, atol=1e-15)
    renamed = gr.Batch(batch.inputs, batch.targets, groups=10 - batch.groups)
    torch.testing.assert_close(gr.regularizers.Fish()(model, renamed), value, rtol=1e-11, atol=1e-15)


def test_vanishing_gradients_stay_finite() -> None:
    model = models.mlp()
    for parameter in model.parameters():
        parameter.data.zero_()
    data = models.batch(6, (0, 0, 0, 1, 1, 1))  # every class once in each: also the bias has gradient zero
    for similarity in ("dot", "cosine"):
        model.zero_grad()
        penalty = gr.regularizers.Fish(similarity=similarity)
        penalty._first_call = False  # nothing to train on at exactly this point
        penalty(model, data).backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_bad_input() -> None:
    model, batch = models.mlp(), models.batch()
    with pytest.raises(BatchError, match="Fish needs"):
        gr.regularizers.Fish()(model, gr.Batch(batch.inputs, batch.targets))
    with pytest.raises(BatchError, match="compares environments"):
        gr.regularizers.Fish()(model, batch[:1])
    with pytest.raises(GradregError, match="dot"):
        gr.regularizers.Fish(similarity="cosine_squared")
