"""Fishr against a loop over single examples, its fast way against its general one, and its moving average."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import BatchError, GradregError
from tests.regularizers import models

EVERY = pytest.mark.parametrize("make", models.MODELS.values(), ids=models.MODELS)
LAST = {"mlp": "2.*", "cnn": "4.*", "transformer": "head.*"}
CHOICES = pytest.mark.parametrize(("name", "glob"), [*LAST.items(), ("mlp", "*"), ("cnn", "*")])


def variances(model: nn.Module, batch: gr.Batch, glob: str) -> Tensor:
    """One backward per example; `[E, P]`."""
    chosen = [p for name, p in model.named_parameters() if glob == "*" or name.startswith(glob[:-1])]
    by_environment: dict[int, list[Tensor]] = {}
    for i in range(len(batch)):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            risk = F.cross_entropy(model(batch.inputs[i : i + 1]), batch.targets[i : i + 1])
        found = torch.autograd.grad(risk, chosen, create_graph=True)
        row = torch.cat([value.flatten() for value in found])
        by_environment.setdefault(int(batch.groups[i]), []).append(row)
    stacks = [torch.stack(rows) for _, rows in sorted(by_environment.items())]
    return torch.stack([(stack - stack.mean(0)).square().mean(0) for stack in stacks])


def naive(model: nn.Module, batch: gr.Batch, glob: str) -> Tensor:
    v = variances(model, batch, glob)
    return sum((row - v.mean(0)).square().sum() for row in v) / len(v)


@CHOICES
def test_equals_a_loop(name, glob) -> None:
    model, batch = models.MODELS[name](), models.three_environments()
    penalty = gr.regularizers.Fishr(wrt=gr.Params(glob))
    models.check_equal(penalty(model, batch), naive(model, batch, glob), model)
    mean = gr.regularizers.Fishr(wrt=gr.Params(glob), reduction="mean")(model, batch)
    size = variances(model, batch, glob).shape[1]
    torch.testing.assert_close(mean * size, naive(model, batch, glob), rtol=1e-10, atol=1e-14)


@EVERY
def test_first_and_second_derivative(make) -> None:
    models.check_derivatives(gr.regularizers.Fishr(), make(), models.batch())
    if make is models.mlp:
        models.check_derivatives(gr.regularizers.Fishr(wrt=gr.Params("*")), make(), models.batch())


def test_the_last_linear_layer_is_the_default() -> None:
    for name, glob in LAST.items():
        model, batch = models.MODELS[name](), models.batch()
        chosen = gr.regularizers.Fishr(wrt=gr.Params(glob))(model, batch)
        torch.testing.assert_close(gr.regularizers.Fishr()(model, batch), chosen, rtol=1e-12, atol=0)


def test_closed_form_of_a_bias() -> None:
    """Of a constant b and half the squared error, single gradients are b - y, whose variance is that of y."""
    model = nn.Sequential(nn.Linear(1, 1)).double()
    y = torch.tensor([[1.0], [3.0], [0.0], [6.0]]).double()
    half = gr.loss(lambda outputs, targets: (outputs - targets).square() / 2)
    batch = gr.Batch(torch.zeros(4, 1).double(), y, groups=torch.tensor([0, 0, 1, 1]))
    with pytest.warns(gr.ZeroSecondDerivativeWarning):  # the variance of labels does not depend on b
        value = gr.regularizers.Fishr(of=half, wrt=gr.Params("0.bias"))(model, batch)
    torch.testing.assert_close(value, torch.tensor(16.0).double(), rtol=1e-12, atol=0)  # variances 1 and 9, mean 5


def test_batch_norm_in_train_mode_before_the_classifier() -> None:
    """The classifier's own gradients exist, whatever mixes examples before it."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    batch = models.three_environments()
    penalty = gr.regularizers.Fishr()(model, batch)
    features = model[:3](batch.inputs).detach()
    plain = nn.Sequential(model[3])
    expected = gr.regularizers.Fishr()(plain, gr.Batch(features, batch.targets, groups=batch.groups))
    torch.testing.assert_close(penalty, expected, rtol=1e-10, atol=1e-14)


def test_one_forward_in_an_objective() -> None:
    model, batch = models.mlp(), models.three_environments()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    penalty = gr.regularizers.Fishr()
    objective = gr.Objective(F.cross_entropy, variance=penalty)
    _, first = objective(model, batch)
    calls.clear()
    _, logs = objective(model, batch)
    assert len(calls) == 1
    torch.testing.assert_close(logs["variance"], first["variance"], rtol=1e-12, atol=0)
    torch.testing.assert_close(logs["variance"], naive(model, batch, "2.*").detach(), rtol=1e-10, atol=0)


def test_heads_take_the_general_way() -> None:
    model, batch = models.shared(), models.three_environments()
    penalty = gr.regularizers.Fishr(wrt=gr.Params("heads.**"))
    members = [nn.Sequential(model.base, head) for head in model.heads]
    expected = sum(naive(member, batch, "1.*") for member in members)
    models.check_equal(penalty(model, batch), expected, model)


def test_tied_and_reused_layers_take_the_general_way() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(6, 4), layer, nn.Tanh(), layer, nn.Linear(4, 3)).double()
    batch = models.three_environments()
    models.check_equal(gr.regularizers.Fishr(wrt=gr.Params("1.*"))(model, batch), naive(model, batch, "1.*"), model)


def test_the_average_moves_in_update_only() -> None:
    model, batch, decay = models.mlp(), models.three_environments(), 0.75
    penalty = gr.regularizers.Fishr(decay=decay)
    first = penalty(model, batch)
    torch.testing.assert_close(penalty(model, batch), first)  # calls alone move nothing
    torch.testing.assert_close(first, naive(model, batch, "2.*"), rtol=1e-10, atol=1e-14)
    objective = gr.Objective(F.cross_entropy, penalty=penalty)
    objective(model, batch)  # moves: the average is (1 - d) v
    old = variances(model, batch, "2.*").detach()
    other = models.three_environments()
    value = penalty(model, other)
    smooth = variances(model, other, "2.*") + decay / (1 - decay) * (1 - decay) * old
    expected = (smooth - smooth.mean(0)).square().sum() / 3
    models.check_equal(value, expected, model)
    objective.eval()
    objective(model, other)
    torch.testing.assert_close(penalty(model, other), value)
    objective.train()
    objective(model, other)
    average = decay * (1 - decay) * old + (1 - decay) * variances(model, other, "2.*").detach()
    restored = gr.regularizers.Fishr(decay=decay)
    restored.load_state_dict(penalty.state_dict())
    smooth = variances(model, batch, "2.*") + decay / (1 - decay) * average
    expected = (smooth - smooth.mean(0)).square().sum() / 3
    torch.testing.assert_close(restored(model, batch), expected, rtol=1e-10, atol=1e-14)


def test_names_and_order_of_environments_do_not_matter() -> None:
    model, batch = models.mlp(), models.three_environments()
    penalty = gr.regularizers.Fishr()
    value = penalty(model, batch)
    renamed = gr.Batch(batch.inputs, batch.targets, groups=10 - batch.groups)
    for other in (renamed, batch[torch.randperm(9)], batch[list(range(9)) * 2]):
        torch.testing.assert_close(penalty(model, other), value, rtol=1e-10, atol=1e-15)


def test_vanishing_gradients_are_finite() -> None:
    model = models.mlp()
    for parameter in model.parameters():
        parameter.data.zero_()
    penalty = gr.regularizers.Fishr()
    penalty._first_call = False
    penalty(model, models.batch()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_bad_input() -> None:
    model, batch = models.mlp(), models.batch()
    with pytest.raises(BatchError, match="Fishr needs"):
        gr.regularizers.Fishr()(model, gr.Batch(batch.inputs, batch.targets))
    with pytest.raises(BatchError, match="compares environments"):
        gr.regularizers.Fishr()(model, batch[[0, 2]])
    with pytest.raises(BatchError, match=r"Group 4 has 1 example in this batch; Fishr needs at least 2"):
        gr.regularizers.Fishr()(model, batch[[0, 1, 2]])
    with pytest.raises(GradregError, match="decay"):
        gr.regularizers.Fishr(decay=1.0)
    with pytest.raises(GradregError, match=r"no nn\.Linear"):
        gr.regularizers.Fishr()(nn.Sequential(nn.Conv1d(1, 3, 6), nn.Flatten()).double(), _images(batch))
    penalty = gr.regularizers.Fishr(decay=0.5)
    gr.Objective(F.cross_entropy, penalty=penalty)(model, batch)
    with pytest.raises(GradregError, match="other parameters"):
        penalty(models.cnn(), batch)


def _images(batch: gr.Batch) -> gr.Batch:
    return gr.Batch(batch.inputs.unsqueeze(1), batch.targets, groups=batch.groups)
