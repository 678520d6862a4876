"""The surrogate for the second pass: values and first derivatives exactly as they are, second ones there."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

import gradreg as gr
from gradreg.diagnosis._activations import OF_MODULE
from gradreg.errors import ZeroSecondDerivativeWarning
from gradreg.testing import check_against_loop
from tests.diagnosis.test_smooth import MAKERS, OwnForward, grid, second, two_heads

FLAT = {name: make for name, make in MAKERS.items() if OF_MODULE[type(make())].bends is not None}
EVERY = pytest.mark.parametrize("make", FLAT.values(), ids=FLAT)


def surrogate(model: nn.Module, beta: float = 10.0) -> gr.diagnosis.SecondPass:
    return gr.smooth_activations(model, surrogate="second_pass", beta=beta)


def two_derivatives(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    x = x.clone().requires_grad_()
    y = module(x.clone())
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    h = torch.autograd.grad(g.sum(), x, allow_unused=True)[0] if g.requires_grad else None
    return y.detach(), g.detach(), h


@EVERY
def test_value_and_slope_are_exact_and_the_second_derivative_that_of_the_smooth_form(
    make: Callable[[], nn.Module],
) -> None:
    module, x = make().double(), grid()
    y = module(x.clone()).detach()
    slope = None if isinstance(module, nn.Hardsigmoid) else two_derivatives(module, x)[1]
    with surrogate(module):
        value, first, found = two_derivatives(module, x)
    if isinstance(module, nn.Hardsigmoid):  # relu6(x + 3) / 6 is the same but for rounding
        torch.testing.assert_close(value, y, rtol=1e-15, atol=1e-15)
    else:
        assert torch.equal(value, y)
        assert torch.equal(first, slope)
    if isinstance(module, nn.Threshold):
        module = nn.Threshold(module.threshold, module.threshold)  # its smooth form has no jump
    if isinstance(module, nn.Hardshrink):
        module = nn.Softshrink(module.lambd)
    torch.testing.assert_close(found, two_derivatives(gr.smooth_activations(module), x)[2], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("count", [2, 5])
def test_the_base_hears_of_the_penalty_and_outputs_do_not_change(count: int) -> None:
    model, x = two_heads(count=count).double(), torch.randn(7, 6, dtype=torch.float64)
    labels = torch.randint(0, 3, (7,))
    with torch.no_grad():
        before = model(x)
    with pytest.warns(ZeroSecondDerivativeWarning):
        plain = gr.regularizers.DiverseHeads()(model, x)
    task = torch.autograd.grad(F.cross_entropy(model(x)[:, 0], labels), model.base[0].weight)[0]
    with surrogate(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(
            model(x), before, rtol=0, atol=0 if count == 2 else 1e-15
        )  # kernels see other strides
        penalty = gr.regularizers.DiverseHeads()(model, x)
        torch.testing.assert_close(penalty, plain, rtol=1e-12, atol=0)
        inside = torch.autograd.grad(F.cross_entropy(model(x)[:, 0], labels), model.base[0].weight)[0]
        torch.testing.assert_close(inside, task, rtol=0, atol=0 if count == 2 else 1e-15)
    penalty.backward()  # the graph remembers, also outside
    assert all(parameter.grad.any() for parameter in model.base.parameters())


def test_all_heads_at_once_equal_one_by_one() -> None:
    model, x = two_heads(count=5).double(), torch.randn(7, 6, dtype=torch.float64)
    pairs = gr.SharedBase(model.base, [*model.heads])
    pairs.heads[0].register_forward_hook(lambda *_: None)  # a hook: heads run in a loop
    found = []
    for each in (model, pairs):
        with surrogate(each):
            penalty = gr.regularizers.DiverseHeads()(each, x)
            found.append(torch.autograd.grad(penalty, list(model.base.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-14)


def test_by_hand() -> None:
    """A head w'relu(h): d/dh of (slope of the output at h) in closed form."""
    module, beta = nn.ReLU(), 4.0
    h = torch.tensor([-0.3, 0.2, 1.0], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    with surrogate(module, beta):
        (g,) = torch.autograd.grad((module(h) * weight).sum(), h, create_graph=True)
    assert torch.equal(g.detach(), weight * (h > 0))
    (second_pass,) = torch.autograd.grad(g.sum(), h)
    sigmoid = torch.sigmoid(beta * h.detach())
    torch.testing.assert_close(second_pass, weight * beta * sigmoid * (1 - sigmoid))


def test_the_base_alone_lowers_the_true_penalty_of_fixed_relu_heads() -> None:
    model, x = two_heads(), torch.randn(64, 6)
    model.heads.requires_grad_(False)
    optimizer, regularizer = torch.optim.SGD(model.base.parameters(), 0.5), gr.regularizers.DiverseHeads()
    values = []
    with surrogate(model):
        for _ in range(30):
            penalty = regularizer(model, x)
            values.append(float(penalty.detach()))
            optimizer.zero_grad()
            penalty.backward()
            optimizer.step()
    assert values[-1] < 0.5 * values[0], values


def test_functions_and_attributes() -> None:
    model, x = OwnForward(), torch.randn(6, 4)
    y = model(x)
    assert not second(model, x).any()
    with surrogate(model) as swaps:
        assert torch.equal(model(x), y)
        assert second(model, x).any()
        assert swaps.swapped == {"(the model)": "leaky_relu, relu, relu_ in OwnForward.forward"}
    assert type(model) is OwnForward
    layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True)
    with surrogate(layer):
        assert layer.activation is not F.relu
    assert layer.activation is F.relu
    assert layer.activation_relu_or_gelu == 1


def test_everything_is_restored_also_after_an_exception() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.PReLU(), OwnForward(), nn.TransformerEncoderLayer(3, 1, 4))
    before = [(module, type(module), dict(vars(module))) for module in model.modules()]
    for _ in range(2):
        with pytest.raises(KeyError), surrogate(model), surrogate(model, beta=3):
            raise KeyError
    context = surrogate(model)
    for _ in range(2):
        with context:
            assert type(model[0]).__name__ == "SecondPassReLU"
    for module, kind, attributes in before:
        assert type(module) is kind
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())


def test_partly_curved_activations_are_left() -> None:
    model = nn.Sequential(nn.Hardswish(), nn.ELU(), nn.ReLU(), nn.LeakyReLU())
    with gr.smooth_activations(model, {nn.LeakyReLU: None}, surrogate="second_pass") as swaps:
        assert list(swaps.swapped) == ["2"]


@EVERY
def test_under_vmap_and_forward_mode(make: Callable[[], nn.Module]) -> None:
    module = make().double()
    if (
        isinstance(module, nn.RReLU)
        or getattr(module, "inplace", False)
        or module(torch.ones(1, 5).double()).dim() != 2
    ):
        return  # torch has no batching rule for the first
    x = torch.randn(4, 5, dtype=torch.float64)
    with surrogate(module):
        check_against_loop(lambda row: module(row[None]).sin().sum(), x)
        slope = grad(lambda row: module(row[None]).sin().sum())
        check_against_loop(slope, x, derivatives=1)
        tangent = torch.randn_like(x)
        _, forward = jvp(vmap(slope), (x,), (tangent,))
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(module(y.clone()).sin().sum(), y, create_graph=True)
        (reverse,) = torch.autograd.grad((g * tangent).sum(), y)
    torch.testing.assert_close(forward, reverse)


def test_only_the_model_of_the_context() -> None:
    model, teacher = OwnForward(), OwnForward()
    with surrogate(model):
        assert not second(teacher, torch.randn(3, 4)).any()


def test_the_doctor_does_not_accuse_the_surrogate() -> None:
    model, x = two_heads(), torch.randn(7, 6)
    regularizer = gr.regularizers.DiverseHeads()
    assert not gr.check_double_backward(model, x, regularizer).ok
    with surrogate(model):
        report = gr.check_double_backward(model, x, regularizer)
    assert report.ok, str(report)
    assert "second pass" in str(report)
