"""Traps of double backward, part D: torch.func and what it does to ordinary modules; none stays silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import gradreg as gr
from gradreg.errors import (
    CompatibilityError,
    CoupledExamplesError,
    SlowRouteWarning,
    UnknownNameError,
)
from gradreg.model import swapped
from gradreg.testing import assert_same, check_against_loop, reference
from tests.diagnosis.small import (
    FEATURE_GRADIENT,
    INPUT_GRADIENT,
    advice,
    by_hand,
    examples,
    status,
    tokens,
    two_heads,
)

ROOT = Path(gr.__file__).parent
LAST = gr.logit(0)


def test_d1_detached_parameters_in_functional_call() -> None:
    def recipe(model: nn.Module, x: Tensor, live: bool) -> Tensor:
        params = {name: p if live else p.detach() for name, p in model.named_parameters()}
        g = vmap(torch.func.grad(lambda xi: functional_call(model, params, (xi[None],))[0, 0]))(x)
        return g.square().sum()

    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    report = gr.check_double_backward(net, examples(), lambda m, x: recipe(m, x, False))
    assert report.parameters["0.weight"].status == "disconnected"
    assert not report.ok
    assert "detach" in advice(report)
    live = gr.check_double_backward(net, examples(), lambda m, x: recipe(m, x, True))
    assert live.ok
    assert live.parameters["0.weight"].status == "ok"


def test_d2_stack_module_state() -> None:
    def stacked(model: gr.SharedBase, x: Tensor) -> Tensor:
        params, buffers = stack_module_state(list(model.heads))
        features = model.base(x)
        one = torch.func.grad(lambda f, p: functional_call(model.heads[0], (p, {}), (f[None],))[0, 0])
        g = vmap(vmap(one, (0, None)), (None, 0))(features, params)
        return (g[0] * g[1]).sum() + 0 * len(buffers)

    model = two_heads(nn.Softplus)
    report = gr.check_double_backward(model, examples(), stacked)
    assert {p.status for name, p in report.parameters.items() if name.endswith("weight") and "heads" in name} == {
        "disconnected"
    }
    assert "stack_module_state" in advice(report)
    alike = gr.SharedBase(
        nn.Linear(6, 4), [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(5)]
    )
    report = gr.check_double_backward(alike, examples(), FEATURE_GRADIENT)
    assert report.ok
    assert report.parameters["heads.4.0.weight"].status == "ok"


def test_d3_misspelt_names() -> None:
    net = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(UnknownNameError, match=r"'0\.weight'"), swapped(net, {"0.wieght": torch.zeros(2, 3)}):
        pass


def test_d4_tied_weights() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    x = torch.randn(3, 4)
    found = gr.gradients(net, x, LAST, gr.Params("*"))
    assert set(found) == {"0.weight"}
    (expected,) = torch.autograd.grad(net(x[:1])[0, 0], net[0].weight)
    torch.testing.assert_close(found["0.weight"][0], expected)


def test_d5_buffers_stay() -> None:
    net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    gr.check_double_backward(net, examples(), (LAST, gr.Activations("0")))
    gr.gradients(net, examples(), LAST, gr.Activations("0"))
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())


def test_d6_eager_habits_inside_a_transform() -> None:
    class Habit(nn.Module):
        def __init__(self, blind: bool) -> None:
            super().__init__()
            self.layer, self.blind = nn.Linear(6, 2), blind

        def forward(self, x: Tensor) -> Tensor:
            if self.blind:
                with torch.no_grad():
                    return self.layer(x)
            x = x.detach().clone()
            x.requires_grad_()
            return self.layer(x).tanh()

    with pytest.raises(CompatibilityError, match=r"no_grad\(\)"):
        gr.gradients(Habit(True), examples(), LAST, gr.Params("*"))
    net = Habit(False)
    with pytest.warns(SlowRouteWarning):
        found = gr.gradients(net, examples(), LAST, gr.Params("layer.weight"), differentiable=True)
    assert_same(found, reference.gradients(net, gr.as_batch(examples()), LAST, gr.Params("layer.weight")))


def test_d7_branches_on_requires_grad() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            return hidden.tanh() if hidden.requires_grad else hidden.sin()

    net = Branching()
    for wrt in (gr.Params("*"), gr.Inputs()):
        found = gr.gradients(net, examples(), LAST, wrt)
        assert_same(found, reference.gradients(net, gr.as_batch(examples()), LAST, wrt))


def test_d8_untouched_parameters_are_told_by_value() -> None:
    def materialized(model: nn.Module, x: Tensor) -> Tensor:
        params = dict(model.named_parameters())
        g = torch.func.grad(lambda xi: functional_call(model, params, (xi,))[:, 0].sum())(x)
        return g.square().sum()

    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    one = gr.check_double_backward(net, examples(), materialized).parameters
    other = gr.check_double_backward(net, examples(), by_hand).parameters
    assert {n: p.status for n, p in one.items()} == {n: p.status for n, p in other.items()}


def test_d9_hessians_without_graph() -> None:
    def curvature(model: nn.Module, x: Tensor, create: bool) -> Tensor:
        hessian = torch.autograd.functional.hessian(lambda xi: model(xi)[:, 0].sum(), x[:2], create_graph=create)
        return hessian.square().sum()

    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    report = gr.check_double_backward(net, examples(), lambda m, x: curvature(m, x, False))
    assert report.parameters["0.weight"].status == "disconnected"
    assert "create_graph=True" in advice(report) or "detach" in advice(report)
    assert gr.check_double_backward(net, examples(), lambda m, x: curvature(m, x, True)).ok


@pytest.mark.parametrize("wrt", [gr.Params("0.*"), gr.Inputs()], ids=["d10", "d11"])
def test_d10_d11_batch_norm_in_train_mode(wrt: Any) -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(CoupledExamplesError, match=r"'1'.*eval mode.*GroupNorm"):
        gr.gradients(net, examples(), LAST, wrt)
    report = gr.check_double_backward(net, examples(), (LAST, wrt))
    assert status(report, "") == {"unsupported"}
    assert "GroupNorm" in str(report)
    net[1].eval()
    assert gr.check_double_backward(net, examples(), (LAST, wrt)).ok


def test_d12_dropout() -> None:
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 2))
    found = gr.gradients(net, examples(), LAST, gr.Params("0.weight"))["0.weight"]
    dead = found.abs().sum(-1) == 0
    assert not torch.equal(dead[0], dead[1])  # masks of their own
    report = gr.check_double_backward(net, examples(), INPUT_GRADIENT)
    assert report.ok
    assert not any("deterministic" in note for note in report.notes)


@pytest.mark.parametrize("cell", [nn.RNN, nn.GRU, nn.LSTM])
def test_d13_recurrent_networks(cell: type[nn.RNNBase]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = cell(4, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x)[0][:, -1])

    net, wrt = Recurrent().double(), gr.Params("inner.weight_ih_l0")
    batch = gr.as_batch(tokens().double())
    with pytest.warns(SlowRouteWarning):
        found = gr.gradients(net, batch, LAST, wrt, differentiable=True)
    assert_same(found, reference.gradients(net, batch, LAST, wrt))
    assert gr.check_double_backward(net, batch, INPUT_GRADIENT).ok


def test_d14_data_dependent_code() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).tanh()
            return self.last(hidden * 2 if bool(hidden.isfinite().all()) else hidden)

    net = Looking()
    with pytest.warns(SlowRouteWarning, match="data-dependent"):
        found = gr.gradients(net, examples(), LAST, gr.Params("*"), differentiable=True)
    assert_same(found, reference.gradients(net, gr.as_batch(examples()), LAST, gr.Params("*")))


def test_d15_hugging_face_with_a_mask() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=4, n_embd=8, n_layer=1, n_head=2, attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = gr.Batch({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}, ids)
    of, wrt = gr.loss(F.cross_entropy), gr.Params("transformer.h.0.mlp.c_fc.weight")
    assert gr.plan(model, batch, of, wrt, differentiable=True).route == "vmap"  # masks are then built in full
    found = gr.gradients(model, batch, of, wrt, differentiable=True)
    assert_same(found, reference.gradients(model, batch, of, wrt))


def test_d16_escaped_tensors() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(6, 2), None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.layer(x).tanh()
            return self.kept

    net = Keeping()
    net(examples())
    kept = net.kept
    gr.gradients(net, examples(), LAST, gr.Params("*"))
    gr.check_double_backward(net, examples(), (LAST, gr.Params("*")))
    assert net.kept is kept


def test_d17_vmap_of_solve() -> None:
    right = torch.randn(3, 1, dtype=torch.float64)
    with pytest.raises(AssertionError):
        check_against_loop(lambda a: torch.linalg.solve(a[None], right), torch.randn(4, 3, 3, dtype=torch.float64))


def test_d18_linearize_is_not_used() -> None:
    assert not any("linearize(" in path.read_text() for path in ROOT.rglob("*.py"))


def test_d19_directional_derivatives_that_are_differentiated_again() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, v = examples().double(), torch.randn(1, 7, 6, dtype=torch.float64)

    def penalty(model: nn.Module, batch: Any) -> Tensor:
        return gr.directional(model, batch, LAST, gr.Inputs(), v, differentiable=True).square().sum()

    assert gr.check_double_backward(net, x, penalty).ok

    def forward_mode(model: nn.Module, x: Tensor) -> Tensor:
        return torch.func.jvp(lambda xi: model(xi)[:, 0], (x,), (v[0],))[1].square().sum()

    report = gr.check_double_backward(net, x, forward_mode)
    assert "wrong" in status(report, "")


def test_d20_where_forward_mode_is_not_available() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, v = examples().double(), torch.randn(1, 7, 6, dtype=torch.float64)
    batch = gr.Batch(x, torch.rand(7, 2, dtype=torch.float64))
    of = gr.loss(nn.HuberLoss())
    found = gr.directional(net, batch, of, gr.Inputs(), v)[:, 0]
    g = gr.gradients(net, batch, of, gr.Inputs())["inputs"]
    torch.testing.assert_close(found, (g * v[0]).sum(1))


def test_d21_one_backward_for_all_heads() -> None:
    model = two_heads(nn.Softplus).double()
    x = examples().double()
    penalty = gr.gradients(model, x, *FEATURE_GRADIENT, differentiable=True)["features"].prod(1).sum()
    features = model.base(x)
    each = [torch.autograd.grad(h(features)[:, 0].sum(), features, create_graph=True)[0] for h in model.heads]
    expected = (each[0] * each[1]).sum()
    torch.testing.assert_close(penalty, expected)
    parameters = list(model.base.parameters())
    for one, other in zip(
        torch.autograd.grad(penalty, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(one, other)
