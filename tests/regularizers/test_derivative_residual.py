"""DerivativeResidual against nested autograd and functions whose derivatives are known, to the fourth order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import BatchError, CoupledExamplesError, GradregError, HeadsError
from gradreg.regularizers.derivative_residual import Poisson
from tests.regularizers import models

Residual = gr.regularizers.DerivativeResidual


class Function(nn.Module):
    """A known function as a model; a factor of one is trained."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.factor * self.function(*inputs, **named)


def smooth_mlp(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def with_layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1)).double()


class LayerNormWrittenOut(nn.Module):
    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


def convolutional() -> nn.Module:
    layers = [nn.Linear(2, 8), nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 2, 3), nn.SiLU(), nn.Flatten(), nn.Linear(12, 1)]
    return nn.Sequential(*layers).double()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 4)
        self.layer = nn.TransformerEncoderLayer(
            4, 2, dim_feedforward=4, dropout=0.0, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x.unsqueeze(2))).sum(1))


NETWORKS = {
    "mlp": smooth_mlp,
    "layer_norm": with_layer_norm,
    "cnn": convolutional,
    "transformer": lambda: Attention().double(),
}
EVERY = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)


def points(n: int = 5, d: int = 2) -> Tensor:
    return torch.rand(n, d, dtype=torch.float64)


def everything(d) -> Tensor:
    """A residual with all orders up to two, mixed."""
    return d.derivative(1) - d.laplacian + d.u * d.derivative(0) + d.derivative(0, 1) - d.x[:, 0]


def naive(model: nn.Module, x: Tensor) -> Tensor:
    """The same residual by nested gradients, the norms of the model written out."""
    x = x.clone().requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        u = model(x).squeeze(1)

    def partial(value: Tensor, axis: int) -> Tensor:
        return torch.autograd.grad(value.sum(), x, create_graph=True)[0][:, axis]

    ux, ut = partial(u, 0), partial(u, 1)
    uxx, utt, uxt = partial(ux, 0), partial(ut, 1), partial(ux, 1)
    return (ut - (uxx + utt) + u * ux + uxt - x[:, 0]).square().mean()


def written_out(model: nn.Module) -> nn.Module:
    """The same parameters, layer normalization in plain arithmetic."""
    if isinstance(model, nn.Sequential):
        return nn.Sequential(*(LayerNormWrittenOut(m) if isinstance(m, nn.LayerNorm) else m for m in model))
    return model


@EVERY
def test_equals_nested_gradients(make) -> None:
    model, x = make(), points()
    if make is NETWORKS["transformer"]:
        norms = [model.layer.norm1, model.layer.norm2]
        value = Residual(everything)(model, x)
        gradients = torch.autograd.grad(value, models.parameters(model), allow_unused=True, materialize_grads=True)
        model.layer.norm1, model.layer.norm2 = (LayerNormWrittenOut(norm) for norm in norms)
        expected = naive(model, x)
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
        others = torch.autograd.grad(expected, models.parameters(model), allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(gradients, others, rtol=1e-9, atol=1e-11)
        return
    models.check_equal(Residual(everything)(model, x), naive(written_out(model), x), model)


@EVERY
def test_first_and_second_derivative(make) -> None:
    """Third and fourth order of the network, through written-out norms."""
    models.check_derivatives(Residual(everything), make(), gr.Batch(points(3)))


def test_orders_one_to_four_of_a_known_function() -> None:
    """u = sin(2x) e^{3t}."""
    model, x = Function(lambda p: (torch.sin(2 * p[:, 0]) * torch.exp(3 * p[:, 1])).unsqueeze(1)), points()
    sin, cos, exp = torch.sin(2 * x[:, 0]), torch.cos(2 * x[:, 0]), torch.exp(3 * x[:, 1])
    known = {
        (0,): 2 * cos * exp,
        (1,): 3 * sin * exp,
        (0, 0): -4 * sin * exp,
        (1, 0): 6 * cos * exp,
        (0, 0, 0): -8 * cos * exp,
        (0, 1, 0): -12 * sin * exp,
        (0, 0, 0, 0): 16 * sin * exp,
        (1, 0, 1, 0): -36 * sin * exp,
        (1, 1, 1, 1): 81 * sin * exp,
    }

    def residual(d) -> Tensor:
        for axes, expected in known.items():
            torch.testing.assert_close(d.derivative(*axes), expected, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(d.laplacian, (9 - 4) * sin * exp, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(d.gradient, torch.stack([2 * cos * exp, 3 * sin * exp], 1), rtol=1e-12, atol=1e-12)
        return d.derivative(0, 0, 1, 1) - 1

    value = Residual(residual)(model, x)
    torch.testing.assert_close(value.detach(), (-36 * sin * exp - 1).square().mean(), rtol=1e-11, atol=0)
    value.backward()  # of the factor a in a(-36 sin e) - 1
    expected = (2 * (-36 * sin * exp - 1) * (-36 * sin * exp)).mean()
    torch.testing.assert_close(model.factor.grad, expected, rtol=1e-10, atol=0)


def test_vector_fields_and_several_outputs() -> None:
    """(x², x t): divergence 3x, Laplacian (2, 0), and a single output's derivative."""
    model, x = Function(lambda p: torch.stack([p[:, 0] ** 2, p[:, 0] * p[:, 1]], 1)), points()

    def residual(d) -> Tensor:
        torch.testing.assert_close(d.divergence, 3 * x[:, 0])
        torch.testing.assert_close(d.laplacian, torch.tensor([2.0, 0.0]).double().expand(5, 2))
        torch.testing.assert_close(d.derivative(0, 1, output=1), torch.ones(5).double())
        torch.testing.assert_close(d.derivative(1), torch.stack([torch.zeros(5).double(), x[:, 0]], 1))
        assert d.gradient.shape == (5, 2, 2)
        return d.gradient[:, 1]

    value = Residual(residual)(model, x)
    torch.testing.assert_close(value.detach(), x.square().sum(1).mean())


def test_poisson_has_a_hand_derived_value() -> None:
    """u = (x² + t²) / 2 has Laplacian 2: with f = -2 the residual is zero, with f = 1 it is -3."""
    model, x = Function(lambda p: p.square().sum(1) / 2), points()
    solved = Residual(Poisson(-2.0))
    solved._first_call = False  # at the solution nothing is sent to the parameters
    assert float(solved(model, x).detach()) < 1e-28
    torch.testing.assert_close(Residual(Poisson(1.0))(model, x).detach(), torch.tensor(9.0).double())
    total = Residual(Poisson(1.0), reduction="sum")(model, x)
    torch.testing.assert_close(total.detach(), torch.tensor(45.0).double())


def test_named_coordinates() -> None:
    model = Function(lambda x, t: torch.sin(x) * t.squeeze(1) ** 2)
    batch = gr.Batch({"x": points(5, 1)[:, 0], "t": points(5, 1)})
    x, t = batch.inputs["x"], batch.inputs["t"][:, 0]

    def heat(d) -> Tensor:
        torch.testing.assert_close(d.derivative("t"), 2 * t * torch.sin(x))
        torch.testing.assert_close(d.derivative(("t", 0), "x"), 2 * t * torch.cos(x))
        assert d.x.shape == (5, 2)
        return d.derivative("t") - d.derivative("x", "x")

    value = Residual(heat)(model, batch)
    torch.testing.assert_close(value.detach(), (2 * t * x.sin() + x.sin() * t**2).square().mean())


def test_forces_are_the_gradient_of_an_energy() -> None:
    model, x, force = smooth_mlp(), points(), torch.randn(5, 2).double()
    value = Residual(lambda d: d.batch.targets + d.gradient)(model, (x, force))
    point = x.clone().requires_grad_()
    gradient = torch.autograd.grad(model(point).sum(), point, create_graph=True)[0]
    models.check_equal(value, (force + gradient).square().sum(1).mean(), model)


def test_a_hessian_is_never_formed_and_rows_are_used_again() -> None:
    """The gradient, both second derivatives of a row and the Laplacian of d coordinates take 1 + d pullbacks."""
    taken = []
    original = torch.autograd.grad

    def counting(*args, **kwargs):
        taken.append(1)
        return original(*args, **kwargs)

    model, x = smooth_mlp(), points()
    penalty = Residual(
        lambda d: d.laplacian + d.derivative(0) + d.derivative(0, 1) + d.derivative(1, 0) + d.gradient[:, 1]
    )
    penalty(model, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", counting)
        penalty(model, x)
    assert len(taken) == 3


def test_permutation_and_duplicates() -> None:
    model, x = smooth_mlp(), points()
    value = Residual(everything)(model, x)
    for other in (x[torch.randperm(5)], x.repeat(2, 1)):
        torch.testing.assert_close(Residual(everything)(model, other), value, rtol=1e-11, atol=1e-14)
    assert torch.isfinite(Residual(everything)(model, x[:1]))


def test_relu_networks_warn() -> None:
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    with pytest.warns(gr.ZeroSecondDerivativeWarning, match="order two"):
        Residual(lambda d: d.laplacian + d.u)(model, points())


def test_bad_input() -> None:
    model, x = smooth_mlp(), points()
    with pytest.raises(GradregError, match="not callable"):
        Residual("laplacian")
    with pytest.raises(GradregError, match="Coordinates are inputs"):
        Residual(everything, wrt=gr.Features())
    with pytest.raises(GradregError, match=r"\[n\] or \[n, r\]"):
        Residual(lambda d: d.u.mean())(model, x)
    with pytest.raises(GradregError, match="broadcast"):
        Residual(lambda d: d.laplacian - d.batch.targets)(model, (x, torch.randn(5, 1).double()))
    with pytest.raises(GradregError, match="no coordinate 2"):
        Residual(lambda d: d.derivative(2))(model, x)
    with pytest.raises(GradregError, match="no coordinate 'y'"):
        Residual(lambda d: d.derivative("y"))(model, x)
    with pytest.raises(GradregError, match="at least one coordinate"):
        Residual(lambda d: d.derivative())(model, x)
    with pytest.raises(GradregError, match="divergence"):
        Residual(lambda d: d.divergence)(model, x)
    with pytest.raises(GradregError, match="output=3"):
        Residual(lambda d: d.derivative(0, output=3))(model, x)
    with pytest.raises(BatchError, match=r"\[n\] or \[n, d\]"):
        Residual(everything)(nn.Sequential(nn.Flatten(), nn.Linear(4, 1)).double(), torch.randn(3, 2, 2).double())
    with pytest.raises(HeadsError, match="without heads"):
        Residual(everything)(gr.Ensemble([smooth_mlp(), smooth_mlp()]), x)
    normalized = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
    with pytest.raises(CoupledExamplesError, match="'1'"):
        Residual(everything)(normalized, x)
    normalized.eval()
    assert torch.isfinite(Residual(everything)(normalized, x))
    with pytest.raises(BatchError):
        Residual(everything)(model, torch.randn(5, 2, dtype=torch.complex128))
    with pytest.raises(GradregError, match="weight"):
        Residual(everything, weight=float("nan"))


def test_same_value_without_grad():
    net, points = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), torch.rand(16, 2)
    residual = gr.regularizers.DerivativeResidual(lambda d: d.derivative(1) - d.derivative(0, 0))
    expected = residual(net, points)
    with torch.no_grad():
        assert residual(net, points) == expected
    assert expected > 0
