"""Traps of double backward, part A (piecewise-linear heads) and B (graphs that are cut in silence): none stays silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import BatchError, DetachedGradientError, DisconnectedWarning, SlowRouteWarning
from tests.diagnosis.small import (
    FEATURE_GRADIENT,
    INPUT_GRADIENT,
    advice,
    by_hand,
    examples,
    kinds,
    named,
    status,
    two_heads,
)

DIVERSE = gr.regularizers.DiverseHeads
PIECEWISE = [nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ReLU6, nn.Hardtanh, nn.Hardshrink, nn.Softshrink]
SMOOTH = [nn.Softplus, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, lambda: nn.Softplus(beta=10)]


# ------------------------------------------------------------------------------------------------------------------------- A
@pytest.mark.parametrize("activation", [*PIECEWISE, lambda: nn.Threshold(0.0, 0.0)])
def test_a1_piecewise_linear_heads_over_a_trainable_base(activation: Callable[[], nn.Module]) -> None:
    report = gr.check_double_backward(two_heads(activation), examples(), DIVERSE())
    assert not report.ok
    assert status(report, "base.") == {"zero"}
    assert named(report) == {"heads.0.1", "heads.1.1"}
    assert "nn.Softplus(beta=10)" in advice(report)


@pytest.mark.parametrize("activation", SMOOTH)
def test_a1_smooth_heads_are_fine(activation: Callable[[], nn.Module]) -> None:
    report = gr.check_double_backward(two_heads(activation), examples(), DIVERSE())
    assert report.ok
    assert status(report, "base.") <= {"ok", "partly_zero"}
    assert not report.causes


def test_a1_a_frozen_base_loses_nothing() -> None:
    model = two_heads(nn.ReLU)
    model.base.requires_grad_(False)
    assert gr.check_double_backward(model, examples(), DIVERSE()).ok


def test_a2_linear_heads() -> None:
    model = gr.SharedBase(nn.Linear(6, 4), [nn.Linear(4, 3) for _ in range(2)])
    report = gr.check_double_backward(model, examples(), DIVERSE())
    assert status(report, "base.") == {"disconnected"}
    assert {(cause.name, cause.curvature) for cause in report.causes} == {("heads.0", "linear"), ("heads.1", "linear")}
    assert "the path is linear" in str(report)


def test_a3_hardsigmoid() -> None:
    report = gr.check_double_backward(two_heads(nn.Hardsigmoid), examples(), DIVERSE())
    assert status(report, "") == {"unsupported"}
    assert named(report) == {"heads.0.1", "heads.1.1"}
    assert "relu6(x + 3) / 6" in advice(report)
    assert "hardsigmoid_backward is not implemented" in str(report)


def test_a4_partly_flat_activations() -> None:
    report = gr.check_double_backward(two_heads(nn.ELU), examples(), DIVERSE())
    assert report.ok
    model = two_heads(lambda: nn.Softplus(beta=50, threshold=1))  # flat above 0.02
    with torch.no_grad():
        for head in model.heads:
            head[0].bias.fill_(5)
    report = gr.check_double_backward(model, examples(), DIVERSE())
    assert status(report, "base.") == {"zero"}
    assert all(cause.low is not None and cause.low > 0.02 for cause in report.causes)
    assert "threshold / beta" in advice(report)


def test_a5_biases_of_a_relu_network_are_expected_zeros() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    for penalty in (INPUT_GRADIENT, by_hand):
        report = gr.check_double_backward(net, examples(), penalty)
        assert report.ok
        assert {name for name, p in report.parameters.items() if p.status == "expected zero"} == {
            "0.bias",
            "2.bias",
            "4.bias",
        }


def test_a6_flat_reductions_pass_gradient_to_other_parameters() -> None:
    class Largest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(len(x), 4, 2).amax(-1)

    heads = [nn.Sequential(nn.Linear(4, 8), Largest(), nn.Linear(4, 3)) for _ in range(2)]
    model = gr.SharedBase(nn.Linear(6, 4), heads)
    report = gr.check_double_backward(model, examples(), DIVERSE())
    assert kinds(report) == {"Largest"}
    assert {cause.curvature for cause in report.causes} == {"piecewise linear"}
    assert report.parameters["heads.0.0.weight"].status in ("ok", "partly_zero")


def test_a7_smooth_heads_are_necessary_not_sufficient() -> None:
    model = gr.SharedBase(nn.Sequential(nn.Linear(6, 4), nn.Tanh()), two_heads(nn.GELU).heads)
    assert gr.check_double_backward(model, examples(), DIVERSE()).ok
    assert "does not show that heads behave differently: look at their predictions" in " ".join(
        (DIVERSE.__doc__ or "").split()
    )


# ------------------------------------------------------------------------------------------------------------------------- B
class Cut(gr.Regularizer):
    """A penalty that forgets something."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        create = self.how != "create_graph"
        g = gr.gradients(model, batch, *INPUT_GRADIENT, differentiable=create)["inputs"]
        return g.square().sum().detach() if self.how == "detach" else g.square().sum()


@pytest.mark.parametrize("how", ["create_graph", "detach"])
def test_b1_b2_a_penalty_without_graph_is_refused(how: str) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(DetachedGradientError, match="differentiable=True"):
        gr.Objective(F.cross_entropy, cut=Cut(how))(net, (examples(), torch.arange(7) % 3))
    report = gr.check_double_backward(net, examples(), Cut(how))
    assert report.parameters["0.weight"].status == "disconnected"
    assert {cause.curvature for cause in report.causes} == {"cut"}
    assert ("create_graph=True" if how == "create_graph" else "do not detach") in advice(report)


def feature_penalty(model: gr.SharedBase, x: Tensor, cut: bool) -> Tensor:
    features = model.base(x).detach().requires_grad_() if cut else model.base(x)
    gradients = [torch.autograd.grad(head(features).sum(), features, create_graph=True)[0] for head in model.heads]
    return (gradients[0] * gradients[1]).sum()


def test_b3_detached_features() -> None:
    model = two_heads(nn.Softplus)
    report = gr.check_double_backward(model, examples(), lambda m, x: feature_penalty(m, x, cut=True))
    assert status(report, "base.") == {"disconnected"}
    assert "keep the tensor attached" in advice(report)
    assert gr.check_double_backward(model, examples(), lambda m, x: feature_penalty(m, x, cut=False)).ok


def test_b4_a_view_made_after_use() -> None:
    def of_a_view(model: gr.SharedBase, x: Tensor) -> Tensor:
        features = model.base(x)
        (g,) = torch.autograd.grad(model.heads[0](features).sum(), features[:, :2], create_graph=True)
        return g.square().sum()

    model = two_heads(nn.Softplus)
    report = gr.check_double_backward(model, examples(), of_a_view)
    assert status(report, "") == {"unsupported"}
    assert "slice the result" in advice(report)
    g = gr.gradients(model, examples(), *FEATURE_GRADIENT)["features"][:, 0, :2]
    features = model.base(examples())
    (expected,) = torch.autograd.grad(model.heads[0](features)[:, 0].sum(), features)
    torch.testing.assert_close(g, expected[:, :2])


def test_b5_what_is_not_used_has_gradient_zero_and_a_warning() -> None:
    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.bias.expand(len(x), 3)

    with pytest.warns(DisconnectedWarning, match="does not depend"):
        g = gr.gradients(Deaf(), examples(), *INPUT_GRADIENT, differentiable=True)["inputs"]
    assert torch.equal(g.pow(2), torch.zeros(7, 6))


def test_b6_heads_that_work_in_place() -> None:
    base = nn.Linear(6, 4)
    tail = [nn.Linear(4, 3) for _ in range(2)]
    inplace = gr.SharedBase(base, [nn.Sequential(nn.ReLU(inplace=True), nn.Tanh(), last) for last in tail])
    plain = gr.SharedBase(base, [nn.Sequential(nn.ReLU(), nn.Tanh(), last) for last in tail])
    found = gr.gradients(inplace, examples(), *FEATURE_GRADIENT)["features"]
    torch.testing.assert_close(found, gr.gradients(plain, examples(), *FEATURE_GRADIENT)["features"])
    assert gr.check_double_backward(inplace, examples(), DIVERSE()).ok


def test_b7_a_change_between_the_passes() -> None:
    def stepping(model: nn.Module, x: Tensor) -> Tensor:
        penalty = by_hand(model, x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        return penalty

    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    before = [parameter.clone() for parameter in net.parameters()]
    report = gr.check_double_backward(net, examples(), stepping)
    assert status(report, "") == {"unsupported"}
    assert "before any optimizer step" in advice(report)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_b8_a_penalty_from_grad_attributes() -> None:
    def from_grad(model: nn.Module, x: Tensor) -> Tensor:
        model(x)[:, 0].sum().backward(create_graph=True)
        return sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)

    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    report = gr.check_double_backward(net, examples(), from_grad)
    assert any("backward(create_graph=True)" in note for note in report.notes)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_b9_a_freed_graph() -> None:
    def freed(model: gr.SharedBase, x: Tensor) -> Tensor:
        features = model.base(x)
        out = model.heads[0](features).square().sum()
        torch.autograd.grad(out, features)
        return out

    report = gr.check_double_backward(two_heads(nn.Softplus), examples(), freed)
    assert status(report, "") == {"unsupported"}
    assert "one final backward" in advice(report)


def test_b10_the_batch_is_left_alone() -> None:
    net, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), examples()
    gr.gradients(net, x, *INPUT_GRADIENT, differentiable=True)
    gr.check_double_backward(net, x, INPUT_GRADIENT)
    assert not x.requires_grad
    assert x.grad is None
    tokens = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(BatchError, match="Activations"):
        gr.gradients(tokens, torch.zeros(2, 3, dtype=torch.long), *INPUT_GRADIENT)


class Blind(nn.Module):
    """A base that computes its features without graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_b11_no_grad() -> None:
    report = gr.check_double_backward(two_heads(nn.Softplus, Blind()), examples(), DIVERSE())
    assert status(report, "base.") == {"disconnected"}
    assert not report.ok
    model = two_heads(nn.Softplus)
    with torch.no_grad():
        inside = gr.gradients(model, examples(), *FEATURE_GRADIENT, differentiable=True)["features"]
        assert gr.check_double_backward(model, examples(), DIVERSE()).ok
    assert inside.requires_grad


def test_b12_inference_mode() -> None:
    model = two_heads(nn.Softplus)
    expected = gr.gradients(model, examples(), *FEATURE_GRADIENT)["features"]
    with torch.inference_mode():
        x = examples()
        torch.testing.assert_close(gr.gradients(model, x, *FEATURE_GRADIENT)["features"], expected)
        assert gr.check_double_backward(model, x, DIVERSE()).ok


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


class _Numpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x = torch.from_numpy(ctx.saved_tensors[0].detach().numpy())
        return gradient * x.exp()


class _SavedMiddle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        middle = x.square()
        ctx.save_for_backward(x.new_tensor(2.0), middle)
        ctx.sign = x.sign()
        return middle * x  # x^3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3 * ctx.saved_tensors[1]  # right, but `middle` is a constant for the next derivative


class Custom(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


@pytest.mark.parametrize("function", [_Once, _Numpy, _SavedMiddle])
def test_b13_custom_functions_with_a_first_derivative_only(function: Any) -> None:
    heads = [nn.Sequential(nn.Linear(4, 5), Custom(function), nn.Linear(5, 3)) for _ in range(2)]
    report = gr.check_double_backward(gr.SharedBase(nn.Linear(6, 4), heads), examples(), DIVERSE())
    assert not report.ok
    assert {"disconnected", "wrong", "zero"} & status(report, "base.") or "wrong" in status(report, "heads.0.0")
    assert named(report) == {"heads.0.1", "heads.1.1"}
    assert all(function.__name__ in cause.kind for cause in report.causes)
    assert "gradgradcheck" in advice(report)


def test_b14_a_custom_function_under_torch_func() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 3 * ctx.saved_tensors[0] ** 2

    net = nn.Sequential(nn.Linear(6, 4), Custom(Cube), nn.Linear(4, 2))
    with pytest.warns(SlowRouteWarning, match="setup_context"):
        found = gr.gradients(net, examples(), gr.logit(0), gr.Params("0.weight"), differentiable=True)["0.weight"]
    for i, x in enumerate(examples()):
        (expected,) = torch.autograd.grad(net(x[None])[0, 0], net[0].weight)
        torch.testing.assert_close(found[i], expected)


def test_b15_frozen_parameters() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    assert set(gr.gradients(net, examples(), gr.logit(0), gr.Params("*"))) == {"2.weight", "2.bias"}
    assert set(gr.check_double_backward(net, examples(), INPUT_GRADIENT).parameters) == {"2.weight", "2.bias"}


def test_b16_hooks_do_not_matter() -> None:
    model, fired = two_heads(nn.Softplus), []
    plain = gr.gradients(model, examples(), *FEATURE_GRADIENT)["features"]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    model.heads[0][1].register_full_backward_hook(lambda *_: None)
    torch.testing.assert_close(gr.gradients(model, examples(), *FEATURE_GRADIENT)["features"], plain)
    assert gr.check_double_backward(model, examples(), DIVERSE()).ok
    assert not fired
    assert len(model.heads[0][1]._backward_hooks) == 1
    assert not model.heads[0][1]._forward_hooks


def test_b17_a_penalty_from_detached_attributions() -> None:
    def input_times_gradient(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
        return (x * g).square().sum()  # requires grad, but says nothing to the weights

    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    report = gr.check_double_backward(net, examples(), input_times_gradient)
    assert not report.ok
    assert report.parameters["0.weight"].status == "disconnected"
