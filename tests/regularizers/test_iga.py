"""IGA against a loop over environments, a closed form, and its edges."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import BatchError, GradregError
from tests.regularizers import models

EVERY = pytest.mark.parametrize("make", models.MODELS.values(), ids=models.MODELS)


def environment_rows(model: nn.Module, batch: gr.Batch) -> Tensor:
    """One forward of everything and one backward per environment, as in the usual code; `[E, P]`."""
    outputs, rows = model(batch.inputs), []
    for label in sorted(set(batch.groups.tolist())):
        chosen = batch.groups == label
        risk = F.cross_entropy(outputs[chosen], batch.targets[chosen])
        found = torch.autograd.grad(risk, models.parameters(model), create_graph=True)
        rows.append(torch.cat([value.flatten() for value in found]))
    return torch.stack(rows)


def naive(model: nn.Module, batch: gr.Batch) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        rows = environment_rows(model, batch)
    return sum((row - sum(rows) / len(rows)).square().sum() for row in rows) / len(rows)


@EVERY
def test_equals_a_loop(make) -> None:
    model, batch = make(), models.three_environments()
    models.check_equal(gr.regularizers.IGA()(model, batch), naive(model, batch), model)
    total = gr.regularizers.IGA(reduction="sum")(model, batch)
    torch.testing.assert_close(total, 3 * naive(model, batch), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fast", [True, False], ids=["factors", "rows"])
@pytest.mark.parametrize("globs", [("*",), ("0.weight", "2.bias")], ids=str)
def test_products_of_factors_and_rows_agree(monkeypatch, fast, globs) -> None:
    monkeypatch.setattr(gr.regularizers.IGA, "_worthwhile", lambda *_: fast)
    model, batch = models.mlp(), models.three_environments()
    penalty = gr.regularizers.IGA(wrt=tuple(map(gr.Params, globs)))
    outputs, chosen = model(batch.inputs), [p for n, p in model.named_parameters() if globs == ("*",) or n in globs]
    rows = []
    for label in (2, 5, 7):
        risk = F.cross_entropy(outputs[batch.groups == label], batch.targets[batch.groups == label])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(risk, chosen, create_graph=True)]))
    expected = sum((row - sum(rows) / 3).square().sum() for row in rows) / 3
    models.check_equal(penalty(model, batch), expected, model)
    assert bool(penalty._layers) is fast
    models.check_derivatives(penalty, model, batch)


def test_the_forward_is_the_tasks_where_products_are_of_factors() -> None:
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    batch = models.batch(4)
    objective = gr.Objective(F.cross_entropy, penalty=gr.regularizers.IGA())
    objective(model, batch)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    _, logs = objective(model, batch)
    assert len(calls) == 1
    torch.testing.assert_close(logs["penalty"], naive(model, batch).detach(), rtol=1e-10, atol=1e-13)


def test_examples_that_mix_behind_a_layer_take_the_joint_forward(monkeypatch) -> None:
    class Centered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) * x[:, :1]

    monkeypatch.setattr(gr.regularizers.IGA, "_worthwhile", lambda *_: True)
    model = nn.Sequential(nn.Linear(6, 5), Centered(), nn.Linear(5, 3)).double()
    batch = models.three_environments()
    models.check_equal(gr.regularizers.IGA()(model, batch), naive(model, batch), model)


@EVERY
def test_first_and_second_derivative(make) -> None:
    models.check_derivatives(gr.regularizers.IGA(), make(), models.batch())


def test_a_mean_gradient_without_graph_is_the_same() -> None:
    model, batch = models.mlp(), models.three_environments()
    rows = environment_rows(model, batch)
    detached = (rows - rows.mean(0).detach()).square().sum() / 3
    models.check_equal(gr.regularizers.IGA()(model, batch), detached, model)


def test_closed_form_of_least_squares() -> None:
    """Of w·x and half the squared error, an environment's gradient is E[(w·x - y) x]."""
    model = nn.Linear(2, 1, bias=False).double()
    x, y = torch.randn(6, 2).double(), torch.randn(6, 1).double()
    groups = torch.tensor([0, 0, 1, 1, 1, 1])
    rows = ((model(x) - y) * x).detach()
    first, second = rows[:2].mean(0), rows[2:].mean(0)
    expected = (first - second).square().sum() / 4  # each of two lies half the difference from their mean
    half = gr.loss(lambda outputs, targets: (outputs - targets).square() / 2)
    value = gr.regularizers.IGA(of=half)(model, gr.Batch(x, y, groups=groups))
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


def test_heads_are_averaged_and_parameters_chosen() -> None:
    model, batch = models.ensemble(), models.three_environments()
    expected = sum(naive(member, batch) for member in model.models) / 9
    torch.testing.assert_close(gr.regularizers.IGA()(model, batch), expected, rtol=1e-10, atol=1e-14)
    single = models.mlp()
    last = gr.regularizers.IGA(wrt=gr.Params("2.*"))(single, batch)
    rows = environment_rows(single, batch)[:, -18:]
    torch.testing.assert_close(last, (rows - rows.mean(0)).square().sum() / 3, rtol=1e-10, atol=1e-14)


@EVERY
def test_names_and_order_of_environments_do_not_matter(make) -> None:
    model, batch = make(), models.three_environments()
    penalty = gr.regularizers.IGA()
    value = penalty(model, batch)
    renamed = gr.Batch(batch.inputs, batch.targets, groups=10 - batch.groups)
    torch.testing.assert_close(penalty(model, renamed), value, rtol=1e-11, atol=1e-15)
    torch.testing.assert_close(penalty(model, batch[torch.randperm(9)]), value, rtol=1e-11, atol=1e-15)
    twice = batch[list(range(9)) * 2]
    torch.testing.assert_close(penalty(model, twice), value, rtol=1e-11, atol=1e-15)


def test_equal_environments_give_zero_and_finite_derivatives() -> None:
    model, batch = models.mlp(), models.batch()
    half = gr.Batch(batch.inputs[[0, 1, 2] * 2], batch.targets[[0, 1, 2] * 2], groups=torch.tensor([0, 0, 0, 1, 1, 1]))
    regularizer = gr.regularizers.IGA()
    regularizer._first_call = False  # equal environments leave nothing to train on
    penalty = regularizer(model, half)
    penalty.backward()
    assert abs(float(penalty.detach())) < 1e-15
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_environments_of_one_example() -> None:
    model, batch = models.mlp(), models.batch(2, (0, 1))
    models.check_equal(gr.regularizers.IGA()(model, batch), naive(model, batch), model)


def test_bad_input() -> None:
    model, batch = models.mlp(), models.batch()
    with pytest.raises(BatchError, match=r"IGA needs Batch\.groups"):
        gr.regularizers.IGA()(model, gr.Batch(batch.inputs, batch.targets))
    with pytest.raises(BatchError, match="all 1 examples of the batch are of group 0"):
        gr.regularizers.IGA()(model, batch[:1])
    with pytest.raises(GradregError, match="parameters"):
        gr.regularizers.IGA(wrt=gr.Inputs())
    with pytest.raises(GradregError, match="-1"):
        gr.regularizers.IGA(weight=-1)
