"""inner_scale: the same gradients, kept from underflow; and GradScaler around a penalty."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.testing import assert_same


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def heads() -> nn.Module:
    return gr.SharedBase(
        nn.Linear(4, 5), [nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(5)]
    ).double()


LOSS = gr.loss(F.cross_entropy)
CALLS: dict[str, tuple[Callable[[], nn.Module], dict[str, object]]] = {
    "inputs": (network, {"wrt": gr.Inputs()}),
    "targets": (network, {"wrt": gr.Inputs(), "of": gr.all_logits()}),
    "features": (heads, {"wrt": gr.Features(), "of": gr.top_logit()}),
    "below features": (heads, {"wrt": gr.Inputs()}),
    "params": (network, {"wrt": gr.Params()}),
    "params, targets": (network, {"wrt": gr.Params(), "of": gr.all_logits()}),
    "loop": (network, {"wrt": gr.Params(), "route": "loop"}),
    "batch": (network, {"wrt": gr.Params(), "per": "batch"}),
}


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_gradients_are_the_same(name: str, differentiable: bool) -> None:
    make, arguments = CALLS[name]
    model, batch = make(), (torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,)))
    arguments = {"of": LOSS, "differentiable": differentiable, **arguments}
    plain = gr.gradients(model, batch, **arguments)
    with gr.inner_scale(2.0**10):
        assert_same(gr.gradients(model, batch, **arguments), plain)


@pytest.mark.parametrize("make", [network, heads])
def test_penalties_and_their_derivatives_are_the_same(make: Callable[[], nn.Module]) -> None:
    model, batch = make(), gr.Batch(torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,)))
    wrt = gr.Features() if make is heads else gr.Inputs()
    objective = gr.Objective(F.cross_entropy, penalty=gr.regularizers.InputGradient(wrt=wrt))

    def derivatives() -> dict[str, Tensor]:
        loss, _ = objective(model, batch)
        return dict(
            zip("abcdefghijklmnopqrstuvwxyz", torch.autograd.grad(loss, list(model.parameters())), strict=False)
        )

    plain = derivatives()
    with gr.inner_scale(2.0**10):
        assert_same(derivatives(), plain)


def test_float16_underflow() -> None:
    """A fitted example has a gradient of about 1e-9: nothing in float16, the right number with a scale."""
    model = network(torch.float32)
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([18.0, 0.0, 0.0]))
    batch = gr.Batch(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))
    penalty = gr.regularizers.InputGradient()
    truth = penalty(model, batch).detach()
    with torch.autocast("cpu", dtype=torch.float16):
        flushed = gr.gradients(model, batch, LOSS, gr.Inputs())["inputs"]
        with gr.inner_scale(2.0**24):  # the loss is float32: its logits' gradients are 1e-8 times that
            value = penalty(model, batch)
    assert flushed.count_nonzero() == 0
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.detach(), truth, rtol=0.05, atol=0)
    value.backward()
    assert model[0].weight.grad.isfinite().all()


def test_features_of_low_precision_come_as_float32() -> None:
    model = heads().float()
    x, of = torch.randn(5, 4), gr.top_logit(centered=True)
    truth = gr.gradients(model, x, of, gr.Features())["features"]
    with torch.autocast("cpu", dtype=torch.float16), gr.inner_scale(2.0**10):
        found = gr.gradients(model, x, of, gr.Features())["features"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, truth, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 256.0, 65536.0])
def test_a_scaler_changes_nothing(scale: float) -> None:
    """The penalty is built from gradients of the loss, never of the scaled loss; a scaler scales the outer backward only."""
    model, batch = network(), gr.Batch(torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,)))
    objective = gr.Objective(F.cross_entropy, penalty=gr.regularizers.InputGradient(weight=3.0))
    expected = torch.autograd.grad(objective(model, batch)[0], list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    loss, _ = objective(model, batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_under_autocast(dtype: torch.dtype) -> None:
    model, batch = network(torch.float32), gr.Batch(torch.randn(64, 4), torch.randint(0, 3, (64,)))
    regularizers = {
        "gradient": gr.regularizers.InputGradient(),
        "jacobian": gr.regularizers.JacobianNorm(),
        "score": gr.regularizers.R1(of=gr.logit(0)),
    }
    _, truth = gr.Objective(F.cross_entropy, **regularizers)(model, batch)
    with torch.autocast("cpu", dtype=dtype):
        loss, logs = gr.Objective(F.cross_entropy, **regularizers)(model, batch)
    for name in regularizers:
        assert logs[name].dtype == torch.float32
        torch.testing.assert_close(logs[name], truth[name], rtol=0.05, atol=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(loss).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_bad_input() -> None:
    for scale in (0.0, -1.0, float("nan"), float("inf"), True):
        with pytest.raises(GradregError, match="inner_scale"), gr.inner_scale(scale):
            pass
