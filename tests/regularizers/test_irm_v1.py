"""IRMv1 against a dummy variable, a closed form, and its edges."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import BatchError, GradregError, ScalarError
from tests.regularizers import models

EVERY = pytest.mark.parametrize("make", models.MODELS.values(), ids=models.MODELS)


def with_dummy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The usual way: the gradient of a risk with respect to a scalar that multiplies the outputs."""
    scale = torch.ones((), dtype=outputs.dtype, requires_grad=True)
    return torch.autograd.grad(F.cross_entropy(outputs * scale, targets), scale, create_graph=True)[0]


def naive(model: nn.Module, batch: gr.Batch, split: bool = False) -> Tensor:
    total, labels = 0.0, sorted(set(batch.groups.tolist()))
    for label in labels:
        part = batch[batch.groups == label]
        outputs = model(part.inputs)
        if split:
            total = total + with_dummy(outputs[::2], part.targets[::2]) * with_dummy(outputs[1::2], part.targets[1::2])
        else:
            total = total + with_dummy(outputs, part.targets).square()
    return total / len(labels)


@EVERY
@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
def test_equals_a_dummy_variable(make, split) -> None:
    model, batch = make(), models.three_environments()
    models.check_equal(gr.regularizers.IRMv1(split=split)(model, batch), naive(model, batch, split), model)


@EVERY
@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
def test_first_and_second_derivative(make, split) -> None:
    models.check_derivatives(gr.regularizers.IRMv1(split=split), make(), models.batch())


def test_closed_form_of_least_squares() -> None:
    """Of f = w·x and the squared error, the derivative at w = 1 is 2 E[(f - y) f]."""
    model = nn.Linear(2, 1, bias=False).double()
    x, y = torch.randn(8, 2).double(), torch.randn(8, 1).double()
    groups = torch.tensor([0, 1] * 4)
    f = model(x).detach()
    slope = 2 * (f - y) * f
    expected = torch.stack([slope[groups == label].mean().square() for label in (0, 1)])
    batch = gr.Batch(x, y, groups=groups)
    for reduction, value in (("mean", expected.mean()), ("sum", expected.sum())):
        penalty = gr.regularizers.IRMv1(of=gr.loss(F.mse_loss), reduction=reduction)
        torch.testing.assert_close(penalty(model, batch), value, rtol=1e-12, atol=0)


def test_split_is_unbiased_and_plain_is_not() -> None:
    """Over all orders of four examples, the products of halves average to the squared mean without its variance."""
    model = nn.Linear(2, 1, bias=False).double()
    x, y = torch.randn(4, 2).double(), torch.randn(4, 1).double()
    slope = (2 * (model(x) - y) * model(x)).detach().squeeze(1)
    pairs = [slope[i] * slope[j] for i in range(4) for j in range(4) if i != j]
    orders = torch.tensor([[0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 3, 2]])
    penalty = gr.regularizers.IRMv1(of=gr.loss(F.mse_loss), split=True)
    zeros = torch.zeros(4, dtype=torch.long)
    values = [penalty(model, gr.Batch(x[order], y[order], groups=zeros)) for order in orders]
    torch.testing.assert_close(torch.stack(values).mean(), torch.stack(pairs).mean(), rtol=1e-12, atol=1e-14)
    assert float(torch.stack(pairs).mean()) < float(slope.mean().square())


def test_heads_are_averaged() -> None:
    model, batch = models.ensemble(), models.three_environments()
    expected = torch.stack([naive(member, batch) for member in model.models]).mean()
    models.check_equal(gr.regularizers.IRMv1()(model, batch), expected, model)
    shared = models.shared()
    members = [nn.Sequential(shared.base, head) for head in shared.heads]
    expected = torch.stack([naive(member, batch) for member in members]).mean()
    models.check_equal(gr.regularizers.IRMv1()(shared, batch), expected, shared)


def test_one_forward_in_an_objective() -> None:
    model, batch = models.mlp(), models.batch()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    penalty = gr.regularizers.IRMv1()
    _, first = gr.Objective(F.cross_entropy, invariance=penalty)(model, batch)  # the first step also checks
    calls.clear()
    _, logs = gr.Objective(F.cross_entropy, invariance=penalty)(model, batch)
    assert len(calls) == 1
    assert torch.equal(first["invariance"], logs["invariance"])
    torch.testing.assert_close(logs["invariance"], naive(model, batch).detach())


@EVERY
def test_names_and_order_of_environments_do_not_matter(make) -> None:
    model, batch = make(), models.three_environments()
    penalty = gr.regularizers.IRMv1()
    value = penalty(model, batch)
    renamed = gr.Batch(batch.inputs, batch.targets, groups=torch.tensor([0, 0, 40, 0, 0, 3, 0, 9])[batch.groups])
    torch.testing.assert_close(penalty(model, renamed), value, rtol=1e-12, atol=1e-15)
    order = torch.randperm(len(batch))
    torch.testing.assert_close(penalty(model, batch[order]), value, rtol=1e-12, atol=1e-15)


def test_edges_are_finite() -> None:
    model = models.mlp()
    for parameter in model.parameters():
        parameter.data.zero_()
    with pytest.warns(gr.ZeroSecondDerivativeWarning):  # outputs of zero: their scale changes nothing
        penalty = gr.regularizers.IRMv1()(model, models.batch())
    penalty.backward()
    assert not penalty.detach().any()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    alone = models.batch()[:1]
    assert torch.isfinite(gr.regularizers.IRMv1()(models.mlp(), alone))


def test_bad_input() -> None:
    model, batch = models.mlp(), models.batch()
    with pytest.raises(BatchError, match=r"IRMv1 needs Batch\.groups"):
        gr.regularizers.IRMv1()(model, gr.Batch(batch.inputs, batch.targets))
    with pytest.raises(BatchError, match="2 examples have a negative group"):
        gr.regularizers.IRMv1()(
            model, gr.Batch(batch.inputs, batch.targets, groups=torch.tensor([0, 1, -1, 0, 1, -100]))
        )
    alone = gr.Batch(batch.inputs, batch.targets, groups=torch.tensor([0, 0, 3, 0, 0, 0]))
    with pytest.raises(BatchError, match="Group 3 has 1 example"):
        gr.regularizers.IRMv1(split=True)(model, alone)
    with pytest.raises(GradregError, match="needs targets"):
        gr.regularizers.IRMv1()(model, gr.Batch(batch.inputs, groups=batch.groups))
    with pytest.raises(GradregError, match="median"):
        gr.regularizers.IRMv1(reduction="median")
    with pytest.raises(GradregError, match="split"):
        gr.regularizers.IRMv1(split="half")
    with pytest.raises(GradregError, match="nan"):
        gr.regularizers.IRMv1(weight=float("nan"))
    with pytest.raises(ScalarError, match="one risk per example"):
        gr.regularizers.IRMv1(of=lambda outputs, batch: outputs.unsqueeze(2).square())(model, batch)
