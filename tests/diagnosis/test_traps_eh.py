"""Traps of double backward, part E (numerics), G (third order) and H (memory): none stays silent. F is test_traps_f.py."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import UnboundedPenaltyWarning
from gradreg.penalties import pairwise_alignment
from gradreg.testing import assert_same
from tests.diagnosis.small import FEATURE_GRADIENT, INPUT_GRADIENT, advice, examples, named, status, two_heads

DIVERSE = gr.regularizers.DiverseHeads


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


# ------------------------------------------------------------------------------------------------------------------------- E
@pytest.mark.parametrize("of_norm", [lambda g: (g**2).sum().sqrt(), lambda g: g.norm()], ids=["sqrt", "norm"])
def test_e1_the_norm_of_a_zero_gradient(of_norm: Callable[[Tensor], Tensor]) -> None:
    dead = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        dead[0].bias.fill_(-100)  # no unit ever fires

    def penalty(model: nn.Module, batch: Any, eps: float | None = None) -> Tensor:
        g = gr.gradients(model, batch, *INPUT_GRADIENT, differentiable=True)["inputs"]
        return ((g**2).sum() + eps).sqrt().sub(1) ** 2 if eps else of_norm(g).sub(1) ** 2

    report = gr.check_double_backward(dead, examples(), penalty)
    assert not report.ok  # NaN, or nothing at all: the critic is dead
    assert {"wrong", "zero", "disconnected"} & status(report, "")
    guarded = gr.check_double_backward(dead, examples(), lambda m, b: penalty(m, b, 1e-12))
    assert guarded.value == pytest.approx(0.999998, abs=1e-6)
    assert "wrong" not in status(guarded, "")


@pytest.mark.parametrize("similarity", ["cosine", "cosine_squared", "abs_cosine"])
def test_e2_cosine_at_a_zero_vector(similarity: str) -> None:
    g = torch.randn(3, 2, 4, dtype=torch.float64)
    g[0, 0] = 0
    g.requires_grad_()
    (first,) = torch.autograd.grad(pairwise_alignment(g, similarity), g, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), g)
    assert bool(first.isfinite().all())
    assert bool(second.isfinite().all())


def test_e3_a_pair_is_squared_over_all_axes_of_an_example() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2)).double()
    x = torch.randn(5, 2, 6, 6, dtype=torch.float64)
    own = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(net(own)[:, 0].sum(), own)
    expected = sum(float(g[i].norm() ** 2) for i in range(5)) / 5
    assert gr.check_double_backward(net, x, INPUT_GRADIENT).value == pytest.approx(expected)


def test_e4_a_mean_reduced_loss_does_not_scale_gradients() -> None:
    net, x, y = network(), examples(), torch.arange(7) % 3
    whole = gr.gradients(net, (x, y), gr.loss(nn.CrossEntropyLoss()), gr.Inputs())["inputs"]
    alone = gr.gradients(net, (x[:1], y[:1]), gr.loss(nn.CrossEntropyLoss()), gr.Inputs())["inputs"]
    torch.testing.assert_close(whole[:1], alone)


def test_e5_a_scaler_scales_the_loss_not_the_penalty() -> None:
    batch = gr.Batch(examples(), torch.arange(7) % 3)
    found = []
    for scale in (1.0, 256.0):
        torch.manual_seed(0)
        model = two_heads(nn.Softplus)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        loss, logs = gr.Objective(F.cross_entropy, diversity=DIVERSE(weight=2.0))(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found.append((float(logs["diversity"]), [p.grad.clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other)


def test_e6_low_precision_is_measured_in_double() -> None:
    model = two_heads(nn.Softplus)
    double = gr.check_double_backward(model, examples(), DIVERSE())
    low = gr.check_double_backward(model.bfloat16(), examples().bfloat16(), DIVERSE())
    assert low.ok
    assert low.dtype == "float64"
    assert low.value == pytest.approx(double.value, rel=0.05)


def test_e7_softplus_above_its_threshold() -> None:
    model = two_heads(lambda: nn.Softplus(beta=100))
    with torch.no_grad():
        for head in model.heads:
            head[0].bias.fill_(4.0)
    report = gr.check_double_backward(model, examples(), DIVERSE())
    assert status(report, "base.") == {"zero"}
    assert named(report) == {"heads.0.1", "heads.1.1"}
    assert "threshold / beta" in advice(report)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0, x.sqrt(), x),
        lambda x: torch.special.xlogy(x.abs(), x.abs()),
        lambda x: x.abs() ** 1.5,
    ],
    ids=["where", "xlogy", "power"],
)
def test_e8_powers_and_guards(function: Callable[[Tensor], Tensor]) -> None:
    class Guarded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    model = nn.Sequential(nn.Linear(6, 8, bias=False), Guarded(), nn.Linear(8, 3))
    x = examples()
    x[0] = 0  # such as a black picture
    report = gr.check_double_backward(model, x, INPUT_GRADIENT)
    assert report.parameters["0.weight"].status == "wrong"
    assert "its gradient is nan" in str(report)
    assert named(report) == {"1"}
    assert "make the argument safe before the function" in advice(report)


def test_e9_ties_of_the_top_logit() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).tanh() * torch.ones(3, dtype=x.dtype) * torch.tensor([1.0, 1.0, 1.0], dtype=x.dtype)

    net = Tied().double()
    x = examples().double()
    routes = [gr.gradients(net, x, gr.top_logit(), gr.Params("*"), route=route) for route in ("vmap", "loop")]
    assert_same(*routes)
    other = gr.gradients(net, x, gr.logit(0), gr.Params("*"))  # the whole gradient goes to one index
    assert_same(routes[0], other)


def test_e10_flips_of_the_top_logit_are_no_fault() -> None:
    class NearlyTied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
            with torch.no_grad():
                self.last.weight[1:] = self.last.weight[:1].flip(1)
                self.last.bias.zero_()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).tanh()) * 1e-3

    model = gr.SharedBase(nn.Linear(6, 4), [NearlyTied() for _ in range(2)])
    report = gr.check_double_backward(model, examples(64), DIVERSE.published())
    assert report.ok, str(report)


def test_e11_a_probability_at_confident_points_is_tiny() -> None:
    model = gr.SharedBase(nn.Linear(6, 4), two_heads(nn.Tanh).heads)
    with torch.no_grad():
        for head in model.heads:
            head[2].bias[0] = 20.0
    report = gr.check_double_backward(model, examples(), (gr.probability(0), gr.Features()))
    assert status(report, "base.") == {"tiny"}
    assert not report.ok
    assert gr.check_double_backward(model, examples(), FEATURE_GRADIENT).ok


def test_e12_unnormalized_dot_products_have_no_bound() -> None:
    torch.manual_seed(0)
    model = gr.SharedBase(nn.Identity(), [nn.Linear(6, 2) for _ in range(2)])
    objective = gr.Objective(None, diversity=DIVERSE(of=gr.logit(0), similarity="dot"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def train() -> None:
        for _ in range(60):
            optimizer.zero_grad()
            objective(model, examples())[0].backward()
            optimizer.step()

    with pytest.warns(UnboundedPenaltyWarning, match="no lower bound"):
        train()


def test_e13_complex_parameters() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 2, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(self.weight.dtype) @ self.weight).abs() ** 2

    report = gr.check_double_backward(Complex(), examples(), INPUT_GRADIENT)
    assert report.ok, str(report)
    assert report.parameters["weight"].status == "partly_zero"  # logit 0 alone


def test_e15_detaching_one_side() -> None:
    def deviations(model: gr.SharedBase, batch: Any) -> Tensor:
        g = gr.gradients(model, batch, *FEATURE_GRADIENT, differentiable=True)["features"]
        return (g - g.mean(1, keepdim=True).detach()).square().sum()  # exact: deviations sum to zero

    def products(model: gr.SharedBase, batch: Any) -> Tensor:
        g = gr.gradients(model, batch, *FEATURE_GRADIENT, differentiable=True)["features"]
        return (g[:, 0] * g[:, 1].detach()).sum()

    model = two_heads(nn.Softplus)
    assert gr.check_double_backward(model, examples(), deviations).ok
    report = gr.check_double_backward(model, examples(), products)
    assert "wrong" in status(report, "base.")


# ------------------------------------------------------------------------------------------------------------------------- G
def hessian_vector(model: nn.Module, batch: Any) -> Tensor:
    """A penalty on v'Hv by hand: training on it takes third derivatives."""
    x = batch.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
    v = torch.linspace(-1, 1, g.numel(), dtype=g.dtype).view_as(g).sin()
    (hv,) = torch.autograd.grad((g * v).sum(), x, create_graph=True)
    return (hv * v).sum()


@pytest.mark.parametrize(
    ("norm", "right"), [("LayerNorm", False), ("RMSNorm", True), ("GroupNorm", True), ("eval", True)]
)
def test_g1_normalizations_at_third_order(norm: str, right: bool) -> None:
    layer = {
        "LayerNorm": lambda: nn.LayerNorm(8),
        "RMSNorm": lambda: nn.RMSNorm(8),
        "GroupNorm": lambda: nn.GroupNorm(2, 8),
        "eval": lambda: nn.BatchNorm1d(8).eval(),
    }[norm]()
    net = nn.Sequential(nn.Linear(6, 8), layer, nn.Tanh(), nn.Linear(8, 3))
    report = gr.check_double_backward(net, examples(), hessian_vector)
    assert report.ok is right
    if not right:
        assert named(report) == {"1"}
        assert report.causes[0].curvature == "wrong"
        assert "write the normalization out" in advice(report)


def test_g1_gradreg_writes_normalizations_out() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))

    def curvature(model: nn.Module, batch: Any) -> Tensor:
        batch = gr.as_batch(batch)
        x = batch.inputs.detach().requires_grad_()
        g = gr.gradients(model, gr.Batch(x), *INPUT_GRADIENT, differentiable=True)["inputs"]
        v = torch.linspace(-1, 1, g.numel(), dtype=g.dtype).view_as(g).sin()
        (hv,) = torch.autograd.grad((g * v).sum(), x, create_graph=True)
        return (hv * v).sum()

    assert gr.check_double_backward(net, examples(), curvature).ok


def test_g2_a_recurrent_network_at_third_order() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x.view(len(x), 3, 2))[0][:, -1])

    assert gr.check_double_backward(Recurrent(), examples(), hessian_vector).ok


# ------------------------------------------------------------------------------------------------------------------------- H
def test_h1_nothing_keeps_parameters_alive() -> None:
    model = two_heads(nn.Softplus)
    batch = gr.Batch(examples(), torch.arange(7) % 3)
    gr.Objective(F.cross_entropy, diversity=DIVERSE())(model, batch)[0].backward()
    gr.check_double_backward(model, batch, DIVERSE())
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not any(reference() is not None for reference in alive)


def test_h2_grad_carries_no_graph() -> None:
    model = two_heads(nn.Softplus)
    batch = gr.Batch(examples(), torch.arange(7) % 3)
    gr.Objective(F.cross_entropy, diversity=DIVERSE())(model, batch)[0].backward()
    assert all(parameter.grad is not None and not parameter.grad.requires_grad for parameter in model.parameters())
