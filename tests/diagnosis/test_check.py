"""check_double_backward: the seed's example, no false alarms, no traces, what the report holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import CompatibilityError, GradregError
from gradreg.testing import zoo
from tests.diagnosis.small import FEATURE_GRADIENT, INPUT_GRADIENT, by_hand, examples, named, status, two_heads

DIVERSE = gr.regularizers.DiverseHeads


# ------------------------------------------------------------------------------------------------------- the seed's example
def test_the_report_on_the_seed_is_short_and_names_everything() -> None:
    report = gr.check_double_backward(two_heads(nn.ReLU), examples(), DIVERSE.published())
    text = str(report)
    assert len(text.splitlines()) <= 15
    for part in ("BLOCKED", "base", "zero !", "heads.0.1 (ReLU)", "heads.1.1 (ReLU)", "piecewise linear, inputs -"):
        assert part in text
    assert "nn.Softplus(beta=10)" in text
    assert "smooth_activations" in text
    assert "freeze it" in text
    with pytest.raises(CompatibilityError, match="BLOCKED"):
        report.raise_if_blocked()


def test_the_smooth_seed_is_ok() -> None:
    report = gr.check_double_backward(two_heads(nn.Softplus), examples(), DIVERSE.published())
    report.raise_if_blocked()
    assert report.ok
    assert not report.causes
    assert not report.notes


def test_plain_values_for_json() -> None:
    report = gr.check_double_backward(two_heads(nn.ReLU), examples(), DIVERSE())
    found = json.loads(json.dumps(report.to_dict()))
    assert found["ok"] is False
    assert found["parameters"]["base.0.weight"]["status"] == "zero"
    assert found["causes"][0]["name"] == "heads.0.1"
    assert found["causes"][0]["low"] < 0 < found["causes"][0]["high"]


# ---------------------------------------------------------------------------------------------------------- no false alarms
def test_relu_base_under_softplus_heads() -> None:
    assert gr.check_double_backward(two_heads(nn.Softplus), examples(), DIVERSE()).ok


def test_wgan_gp_through_a_leaky_relu_critic() -> None:
    critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def penalty(model: nn.Module, batch: gr.Batch) -> Tensor:
        mix = torch.linspace(0, 1, len(batch), dtype=batch.inputs.dtype)[:, None]
        points = mix * batch.inputs + (1 - mix) * batch.extras["fakes"]
        g = gr.gradients(model, batch, gr.logit(0), gr.Inputs(), at={"inputs": points}, differentiable=True)["inputs"]
        return ((g.square().sum(1) + 1e-12).sqrt() - 1).square().mean()

    batch = gr.Batch(examples(16), extras={"fakes": examples(16).flip(0)})
    report = gr.check_double_backward(critic, batch, penalty)
    assert report.ok, str(report)
    assert report.parameters["0.weight"].status == "ok"


@pytest.mark.parametrize("penalty", [INPUT_GRADIENT, by_hand], ids=["pair", "by hand"])
def test_max_pool_network_under_an_input_gradient_penalty(penalty: Any) -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )
    report = gr.check_double_backward(net, torch.randn(5, 1, 8, 8), penalty)
    assert report.ok, str(report)


@pytest.mark.parametrize("penalty", [INPUT_GRADIENT, by_hand], ids=["pair", "by hand"])
def test_gru(penalty: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x)[0].mean(1))

    assert gr.check_double_backward(Recurrent(), torch.randn(4, 5, 3), penalty).ok


@pytest.mark.parametrize("of", [gr.logit(0), gr.loss(F.cross_entropy)])
def test_transformer_with_gradients_of_gradreg(of: Any) -> None:
    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, activation="relu", batch_first=True)
            self.encoder, self.last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.encoder(x).mean(1))

    report = gr.check_double_backward(Transformer(), (torch.randn(3, 5, 4), torch.tensor([0, 1, 0])), (of, gr.Inputs()))
    assert report.ok, str(report)


def test_exact_kinks_under_the_data_raise_no_alarm() -> None:
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3))
    x = examples()
    x[:3] = 0  # black pictures: every unit sits on its kink
    assert gr.check_double_backward(net, x, (gr.top_logit(), gr.Inputs())).ok
    nn.init.zeros_(net[2].weight)  # and all logits tie
    report = gr.check_double_backward(
        net, (examples(), torch.arange(7) % 3), (gr.loss(F.cross_entropy), gr.Params("2.*"))
    )
    assert "wrong" not in status(report, "")


def test_relu_off_the_blocking_path_is_not_accused() -> None:
    tail = [
        nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)
    ]
    assert gr.check_double_backward(gr.SharedBase(nn.Linear(6, 4), tail), examples(), DIVERSE()).ok
    report = gr.check_double_backward(two_heads(nn.ReLU), examples(), DIVERSE())
    assert "base.1" not in named(report)


def test_mixture_of_experts_with_hard_routing() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(6, 2), nn.ModuleList([nn.Linear(6, 3) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            weights = self.gate(x).softmax(-1)
            best = weights.argmax(-1)
            outputs = torch.stack([expert(x) for expert in self.experts], 1)
            return outputs[torch.arange(len(x)), best] * weights.amax(-1, keepdim=True)

    report = gr.check_double_backward(Routed(), examples(), INPUT_GRADIENT)
    assert report.ok, str(report)


def test_padding_rows_are_without_gradient_by_intention() -> None:
    net = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2))
    ids = torch.tensor([[0, 1, 2], [3, 0, 0]])
    report = gr.check_double_backward(net, ids, (gr.logit(0), gr.Activations("0")))
    assert report.ok, str(report)
    assert report.parameters["0.weight"].zero_share > 0.1


def test_weight_normalization_is_right_with_gradreg_and_found_wrong_without() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.Tanh(), nn.Linear(4, 2))
    assert gr.check_double_backward(net, examples(), (gr.logit(0), gr.Params("*"))).ok

    def plain(model: nn.Module, x: Tensor) -> Tensor:
        found = torch.autograd.grad(model(x).sum(), list(model[0].parameters()), create_graph=True, allow_unused=True)
        return sum(g.square().sum() for g in found if g is not None)

    report = gr.check_double_backward(net, examples(), plain)
    assert report.parameters["0.parametrizations.weight.original1"].status == "wrong"
    assert named(report) == {"0.parametrizations.weight.0"}
    assert "v * (g / v.norm())" in str(report)


def test_one_curved_head_is_enough_for_the_base() -> None:
    heads = [nn.Sequential(nn.Linear(4, 8), make(), nn.Linear(8, 3)) for make in (nn.ReLU, nn.Softplus)]
    assert gr.check_double_backward(gr.SharedBase(nn.Linear(6, 4), heads), examples(), DIVERSE()).ok


def test_a_silent_part_before_an_activation() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    report = gr.check_double_backward(net, examples(), (gr.logit(0), gr.Activations("1")))
    assert status(report, "0.") == {"zero"}
    assert named(report) == {"3"}
    assert report.parameters["2.weight"].status in ("ok", "partly_zero")


# ---------------------------------------------------------------------------------------------------------------- no traces
class Troubled(nn.Module):
    """Has whatever a diagnosis might disturb: dropout, buffers, counters, odd modes, and old weight normalization."""

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))
        self.constant = torch.ones(4)
        self.calls, self.fail = 0, fail

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fail and self.calls > 1:
            raise RuntimeError("the model gives up")
        return self.body(x) * self.constant


@pytest.mark.parametrize("fail", [False, True])
def test_nothing_is_left_behind(fail: bool) -> None:
    model = gr.SharedBase(Troubled(fail), two_heads(nn.ReLU).heads)
    model.base.body[2].eval()
    model.heads[0].requires_grad_(False)
    for parameter in model.base.parameters():
        parameter.grad = torch.ones_like(parameter)
    regularizer, batch = DIVERSE.published(), gr.Batch(examples(), torch.arange(7) % 3)
    before = [(tensor, tensor.clone(), tensor._version) for tensor in model.state_dict(keep_vars=True).values()]
    grads = [parameter.grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    state, own = torch.get_rng_state(), dict(vars(regularizer))
    apply, dtype = vars(torch.autograd.Function)["apply"], torch.get_default_dtype()
    report = gr.check_double_backward(model, batch, regularizer)
    assert report.ok is False
    assert all(torch.equal(tensor, old) and tensor._version == version for tensor, old, version in before)
    assert all(a is b for a, (b, _, _) in zip(model.state_dict(keep_vars=True).values(), before, strict=True))
    assert all(a is b.grad for a, b in zip(grads, model.parameters(), strict=True))
    assert modes == [module.training for module in model.modules()]
    for name, module in model.named_modules():
        assert attributes[name] == dict(vars(module)) or all(vars(module)[k] is v for k, v in attributes[name].items())
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert torch.equal(state, torch.get_rng_state())
    assert own == dict(vars(regularizer))
    assert vars(torch.autograd.Function)["apply"] is apply
    assert torch.get_default_dtype() is dtype


def test_hooks_of_the_user_stay_and_run() -> None:
    model, seen = two_heads(nn.Softplus), []
    handle = model.base.register_forward_hook(lambda *_: seen.append(1))
    gr.check_double_backward(model, examples(), DIVERSE())
    assert seen
    assert list(model.base._forward_hooks) == [handle.id]


# ------------------------------------------------------------------------------------------------------- what can be checked
def test_a_function_gets_the_batch_as_it_was_given() -> None:
    net, y = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.arange(7) % 3

    def on_pair(model: nn.Module, batch: Any) -> Tensor:
        x, labels = batch
        assert x.dtype == torch.float64
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(model(x), labels, reduction="sum"), x, create_graph=True)
        return g.square().sum()

    def on_batch(model: nn.Module, batch: gr.Batch) -> Tensor:
        return on_pair(model, (batch.inputs, batch.targets))

    assert gr.check_double_backward(net, (examples(), y), on_pair).ok
    assert gr.check_double_backward(net, (examples(), y), on_batch).ok
    assert gr.check_double_backward(net, gr.Batch(examples(), y), on_batch).ok


@pytest.mark.parametrize(
    ("regularizer", "match"),
    [
        (3, "cannot be diagnosed"),
        (gr.logit(0), "give a pair"),
        ((gr.logit(0), "inputs"), "wrt holds"),
        (lambda m, b: m(b), "real scalar"),
        ((gr.logit(9), gr.Inputs()), "9"),
        ((gr.true_logit(), gr.Inputs()), "targets"),
    ],
)
def test_misuse_is_an_error_not_a_report(regularizer: Any, match: str) -> None:
    with pytest.raises(GradregError, match=match):
        gr.check_double_backward(nn.Linear(6, 3), examples(), regularizer)


def test_frozen_models_and_functions_are_refused() -> None:
    net = nn.Linear(6, 3).requires_grad_(False)
    with pytest.raises(CompatibilityError, match="requires grad"):
        gr.check_double_backward(net, examples(), INPUT_GRADIENT)
    with pytest.raises(CompatibilityError, match=r"nn\.Module"):
        gr.check_double_backward(lambda x: x, examples(), INPUT_GRADIENT)


def test_precision_of_the_model_where_double_is_impossible() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise RuntimeError("float32 only")
            return self.last(self.first(x).tanh())

    report = gr.check_double_backward(Single(), examples(), INPUT_GRADIENT)
    assert report.ok
    assert report.dtype == "own precision"
    assert any("float32 only" in note for note in report.notes)


def test_a_random_penalty_is_not_accused() -> None:
    def noisy(model: nn.Module, batch: Any) -> Tensor:
        g = gr.gradients(model, batch, *INPUT_GRADIENT, differentiable=True)["inputs"]
        return (g * torch.rand(len(g), 1, generator=fresh)).square().sum()

    fresh = torch.Generator()
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    report = gr.check_double_backward(net, examples(), noisy)
    assert report.ok
    assert any("not deterministic" in note for note in report.notes)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_a_penalty_at_its_minimum_says_so(activation: Callable[[], nn.Module]) -> None:
    def inactive(model: nn.Module, batch: Any) -> Tensor:
        g = gr.gradients(model, batch, *INPUT_GRADIENT, differentiable=True)["inputs"]
        return (g.square().sum(1) - 1e6).relu().mean()

    report = gr.check_double_backward(
        nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 3)), examples(), inactive
    )
    assert not report.ok
    assert "0 on this batch" in str(report)


# a sample: every way to be awkward, none of which is a fault
ZOO = [
    "mlp",
    "tied_weights",
    "counting_buffer",
    "attention_without_weights",
    "causal_language_model",
    "token_ids",
    "bare_parameters",
    "checkpointed",
]


@pytest.mark.parametrize("name", ZOO)
def test_awkward_models_raise_no_alarm(name: str) -> None:
    case = zoo.case(name)
    for what, wrt in case.wrts.items():
        if what in ("params", "inputs"):
            report = gr.check_double_backward(case.make_model(), case.make_batch(), (case.of, wrt))
            assert report.ok, str(report)


def test_a_diagnosis_leaves_the_fast_route_open() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    gr.check_double_backward(net, examples(), (gr.logit(0), gr.Params("*")))
    assert gr.plan(net, examples(), gr.logit(0), gr.Params("*"), differentiable=True).route == "vmap"


@pytest.mark.parametrize("make", [nn.ReLU, nn.Softplus])
def test_a_regularizer_keeps_its_state(make: Callable[[], nn.Module]) -> None:
    regularizer = DIVERSE.published()
    gr.check_double_backward(two_heads(make), examples(), regularizer)
    assert regularizer._first_call
    assert regularizer._floor is None


def test_heads_that_share_one_vmapped_pass_are_named_one_by_one() -> None:
    heads = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(9)]
    report = gr.check_double_backward(gr.SharedBase(nn.Linear(6, 4), heads), examples(), FEATURE_GRADIENT)
    assert named(report) == {f"heads.{k}.1" for k in range(9)}
    assert len(str(report).splitlines()) <= 15
