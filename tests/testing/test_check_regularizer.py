"""The suite itself: what is right passes, and every kind of defect is caught under its own name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gradreg as gr
from gradreg.errors import GradregError, ZeroSecondDerivativeWarning
from gradreg.testing import REGULARIZER_PROPERTIES, check_regularizer, reference, zoo
from gradreg.testing.checks import CheckFailure
from tests.cases import small_batch, smooth_heads


def net(activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 2))


def data(n: int = 4) -> gr.Batch:
    return gr.Batch(torch.randn(n, 3), torch.arange(n) % 2)


def slopes(model: nn.Module, batch: gr.Batch) -> Tensor:
    return gr.gradients(model, batch, gr.logit(0), gr.Inputs(), differentiable=True)["inputs"]


def penalty(model: nn.Module, batch: gr.Batch) -> Tensor:
    return slopes(model, batch).square().sum(1).mean()


class InputGradient(gr.Regularizer):
    """Right in everything; defects below change one thing."""

    def terms(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        return slopes(model, batch).square().sum(1)

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        return self.terms(model, batch).mean()


def failures(reg: Any, model: nn.Module | None = None, batch: Any = None, **options: Any) -> dict[str, str]:
    with pytest.raises(CheckFailure) as caught:
        check_regularizer(reg, model or net(), data() if batch is None else batch, **options)
    return {finding.name: finding.detail for finding in caught.value.report.failures}


def test_diverse_heads_passes_with_its_naive_loop() -> None:
    def naive(model: nn.Module, batch: gr.Batch) -> Tensor:
        g = reference.gradients(model, batch, gr.top_logit(centered=True), gr.Features())["features"]
        return reference.pairwise_alignment(g, mean=True).mean()

    report = check_regularizer(gr.regularizers.DiverseHeads(), smooth_heads(2), small_batch(3), reference=naive)
    held = {finding.name for finding in report.findings if finding.status == "passed"}
    assert held == set(REGULARIZER_PROPERTIES) - {"chunk_size"}
    assert "\n  value              ok" in str(report)


@pytest.mark.parametrize("name", REGULARIZER_PROPERTIES)
def test_as_a_parametrized_suite(name: str) -> None:
    report = check_regularizer(InputGradient(), net(), data(), only=[name])
    assert [finding.name for finding in report.findings] == [name]


# --- defects ----------------------------------------------------------------------------------------------------------------


def no_graph(model: nn.Module, batch: gr.Batch) -> Tensor:
    return penalty(model, batch).detach()


def not_scalar(model: nn.Module, batch: gr.Batch) -> Tensor:
    return slopes(model, batch).square().sum(1)


def not_finite(model: nn.Module, batch: gr.Batch) -> Tensor:
    return penalty(model, batch) * float("nan")


@pytest.mark.parametrize(
    ("defect", "words"),
    [(no_graph, "carries no graph"), (not_scalar, r"shape \(4,\)"), (not_finite, "The value is nan")],
)
def test_what_cannot_be_trained_on_ends_the_suite(defect: Any, words: str) -> None:
    with pytest.raises(CheckFailure, match=words) as caught:
        check_regularizer(defect, net(), data())
    assert [finding.name for finding in caught.value.report.findings] == ["runs"]


def one_side_detached(model: nn.Module, batch: gr.Batch) -> Tensor:
    g = slopes(model, batch)
    return (g * g.detach()).sum(1).mean()


def first_layer_detached(model: nn.Module, batch: gr.Batch) -> Tensor:
    frozen = copy.deepcopy(model[0]).requires_grad_(False)
    g = gr.gradients(nn.Sequential(frozen, *model[1:]), batch, gr.logit(0), gr.Inputs(), differentiable=True)
    return g["inputs"].square().sum(1).mean()


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 1.9 * x


class OnceOnly(WrongBackward):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x


class OutsideTheGraph(WrongBackward):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x.detach()


def with_function(function: Any) -> Callable[[nn.Module, gr.Batch], Tensor]:
    return lambda model, batch: function.apply(slopes(model, batch)).sum(1).mean()


def test_a_detached_factor_fails_the_first_derivative() -> None:
    found = failures(one_side_detached, only=["first_derivative", "permutation"])
    assert set(found) == {"first_derivative"}
    assert "finite differences give" in found["first_derivative"]
    assert "Worst at" in found["first_derivative"]


def test_a_detached_part_is_named() -> None:
    found = failures(first_layer_detached, only=["first_derivative"])
    assert "with respect to 0." in found["first_derivative"]
    assert "is missing (None)" in found["first_derivative"]


def test_a_wrong_custom_backward_fails_the_first_derivative() -> None:
    assert "wrong backward" in failures(with_function(WrongBackward), only=["first_derivative"])["first_derivative"]


@pytest.mark.parametrize("function", [OnceOnly, OutsideTheGraph])
def test_a_function_of_first_order_fails_the_second_derivative_only(function: Any) -> None:
    found = failures(with_function(function), only=["first_derivative", "second_derivative", "gradgradcheck"])
    assert set(found) == {"second_derivative", "gradgradcheck"}


def mean_inside(model: nn.Module, batch: gr.Batch) -> Tensor:
    x = batch.inputs.detach().clone().requires_grad_()
    loss = F.cross_entropy(model(x), batch.targets)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    return g.square().sum(1).mean()


def test_a_mean_reduced_loss_inside_couples_to_the_batch_size() -> None:
    found = failures(mean_inside, additive=True, only=["additive", "duplicates", "permutation"])
    assert set(found) == {"additive", "duplicates"}
    assert "the mean times n^-2" in found["additive"]
    assert "factor 0.25" in found["duplicates"]


class Sum(InputGradient):
    reduction = "mean"

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        return self.terms(model, batch).sum()


def test_a_sum_that_says_it_is_a_mean() -> None:
    found = failures(Sum(), only=["value", "additive", "permutation", "duplicates"])
    assert set(found) == {"additive", "duplicates"}
    assert "is the sum over examples" in found["additive"]


class NormOfMean(InputGradient):
    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        return slopes(model, batch).mean(0).square().sum()


class Honest(NormOfMean):
    additive = False


class Modest(InputGradient):
    additive = False


def test_additivity_is_measured() -> None:
    assert set(failures(NormOfMean(), only=["additive", "permutation", "duplicates"])) == {"additive"}
    assert (
        check_regularizer(Honest(), net(), data(), only=["additive"])["additive"].detail == "not additive, as declared"
    )
    assert "though not declared" in check_regularizer(Modest(), net(), data(), only=["additive"])["additive"].detail


def unbiased(model: nn.Module, batch: gr.Batch) -> Tensor:
    return slopes(model, batch).var(0).sum()


def test_an_unbiased_variance_depends_on_the_batch_size_and_on_having_two() -> None:
    with pytest.warns(UserWarning, match="degrees of freedom"):
        found = failures(unbiased, only=["duplicates", "single_example"])
    assert set(found) == {"duplicates", "single_example"}


def by_position(model: nn.Module, batch: gr.Batch) -> Tensor:
    terms = slopes(model, batch).square().sum(1)
    return (terms * torch.arange(1, len(batch) + 1)).mean()


def test_weights_by_position_fail_the_permutation() -> None:
    assert "in the order [1, 2, 3, 0]" in failures(by_position, only=["permutation"])["permutation"]


def noisy(model: nn.Module, batch: gr.Batch) -> Tensor:
    g = slopes(model, batch)
    return (g * torch.randn_like(g)).sum(1).square().mean()


def test_random_numbers_are_named_and_allowed_with_a_seed() -> None:
    assert "pass seed=0" in failures(noisy, only=["randomness"])["randomness"]
    report = check_regularizer(noisy, net(), data(), seed=3, only=["first_derivative", "permutation"])
    assert report["first_derivative"].status == "passed"
    assert report["permutation"].status == "not applicable"


class Remembers(InputGradient):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        value = super().forward(model, batch)
        self.average = 0.9 * self.average + 0.1 * value.detach()
        return value


class Counts(InputGradient):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        self.calls += 1
        return super().forward(model, batch) * self.calls


class Proper(Remembers):
    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        return InputGradient.forward(self, model, batch) + self.average

    def update(self, model: nn.Module, batch: gr.Batch) -> None:
        self.average = self.average + 1


def test_state_moves_in_update_only() -> None:
    assert "'average' of the regularizer moved in forward" in failures(Remembers(), only=["state"])["state"]
    assert "The same batch gave" in failures(Counts(), only=["state"])["state"]
    assert check_regularizer(Proper(), net(), data(), only=["state", "no_side_effects"]).ok


def writes_inputs(model: nn.Module, batch: gr.Batch) -> Tensor:
    batch.inputs.mul_(1.001)
    return penalty(model, batch)


def flags_inputs(model: nn.Module, batch: gr.Batch) -> Tensor:
    x = batch.inputs.requires_grad_()
    (g,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
    return g.square().sum(1).mean()


def writes_parameters(model: nn.Module, batch: gr.Batch) -> Tensor:
    value = penalty(model, batch)
    model[0].weight.data.mul_(0.999)
    return value


def fills_grad(model: nn.Module, batch: gr.Batch) -> Tensor:
    model(batch.inputs).sum().backward()
    return penalty(model, batch)


def stays_in_eval(model: nn.Module, batch: gr.Batch) -> Tensor:
    return penalty(model.eval(), batch)


def leaves_a_hook(model: nn.Module, batch: gr.Batch) -> Tensor:
    model[0].register_forward_hook(lambda *_: None)
    return penalty(model, batch)


def eval_without_finally(model: nn.Module, batch: gr.Batch) -> Tensor:
    model.eval()
    value = penalty(model, batch)
    model.train()
    return value


@pytest.mark.parametrize(
    ("defect", "words"),
    [
        (writes_inputs, "Changed: the batch's input 'inputs'"),
        (flags_inputs, "Changed: requires_grad of the batch's input"),
        (writes_parameters, "Changed: parameter '0.weight'"),
        (fills_grad, "Changed: 0.bias.grad, 0.weight.grad"),
        (stays_in_eval, "Changed: the train flag of module '0'"),
        (leaves_a_hook, "Changed: forward hooks of module '0'"),
        (eval_without_finally, "by a call that raised: the train flag"),
    ],
)
def test_side_effects_are_named(defect: Any, words: str) -> None:
    assert words in failures(defect, only=["no_side_effects"])["no_side_effects"]


def bare_norm(model: nn.Module, batch: gr.Batch) -> Tensor:
    return (slopes(model, batch).square().sum(1).sqrt() - 1).square().mean()


def safe_norm(model: nn.Module, batch: gr.Batch) -> Tensor:
    return ((slopes(model, batch).square().sum(1) + 1e-12).sqrt() - 1).square().mean()


def test_the_norm_of_a_zero_gradient() -> None:
    assert "Put eps inside the root" in failures(bare_norm, only=["zero_gradients"])["zero_gradients"]
    assert check_regularizer(safe_norm, net(), data(), additive=True, only=["zero_gradients"]).ok


def fixed_dtype(model: nn.Module, batch: gr.Batch) -> Tensor:
    return (slopes(model, batch) @ torch.eye(3, dtype=torch.float64)).square().sum(1).mean()


def test_a_fixed_dtype_is_found_in_lower_precision() -> None:
    found = failures(fixed_dtype, net().double(), data().to(torch.float64), only=["float32", "bfloat16", "permutation"])
    assert set(found) == {"float32", "bfloat16"}
    assert "take dtype and device from the gradients" in found["float32"]


def cancelling(model: nn.Module, batch: gr.Batch) -> Tensor:
    return (slopes(model, batch).square().sum(1) + 1e6).mean() - 1e6


def test_cancellation_is_found_in_float32() -> None:
    assert set(failures(cancelling, only=["float32", "additive"])) == {"float32"}


class SecondOrder(InputGradient):
    """Holds second derivatives, but declares order 2."""

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        x = batch.inputs.detach().clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        return h.square().sum(1).mean()


class ThirdOrder(SecondOrder):
    order = 3


class Boasting(InputGradient):
    order = 3


def test_the_order_is_measured() -> None:
    assert (
        "order=2, but a training step takes derivatives of order 3" in failures(SecondOrder(), only=["order"])["order"]
    )
    assert (
        check_regularizer(ThirdOrder(), net(), data(), only=["order"])["order"].detail
        == "3, 3 through the model's modules"
    )
    assert "of order 2" in failures(Boasting(), only=["order"])["order"]


class ReadsTargets(InputGradient):
    def terms(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        g = gr.gradients(model, batch, gr.loss(F.cross_entropy), gr.Inputs(), differentiable=True)["inputs"]
        return g.square().sum(1)


class SaysSo(ReadsTargets):
    needs_targets = True


class Careless(InputGradient):
    def terms(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        return super().terms(model, batch) * batch.targets.abs()


class AsksInVain(InputGradient):
    needs_targets = True

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.forward(model, gr.as_batch(batch))


class ReadsIfThere(ReadsTargets):
    def terms(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        return slopes(model, batch).square().sum(1) if batch.targets is None else super().terms(model, batch)


def test_the_need_of_targets_is_measured() -> None:
    report = check_regularizer(ReadsTargets(), net(), data(), only=["needs_targets"])
    assert "loss() needs targets" in report["needs_targets"].detail
    assert "raises AttributeError" in failures(Careless(), only=["needs_targets"])["needs_targets"]
    assert "targets are read" in failures(ReadsIfThere(), only=["needs_targets"])["needs_targets"]
    assert "there is no error" in failures(AsksInVain(), only=["needs_targets"])["needs_targets"]
    assert (
        check_regularizer(SaysSo(), net(), data(), only=["needs_targets"])["needs_targets"].detail
        == "needed, and asked for"
    )


class InPlaceOnShared(InputGradient):
    def shares(self) -> Any:
        return [(gr.logit(0), gr.Inputs())]

    def terms(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        return slopes(model, batch).mul_(2).square().sum(1)


def test_in_place_on_shared_gradients() -> None:
    assert set(failures(InPlaceOnShared(), only=["shared_forward", "no_side_effects", "state"])) == {"shared_forward"}


class Chunked(InputGradient):
    """Averages the means of chunks, wrong where they are unequal."""

    def __init__(self, chunk_size: int | None = None, weigh: bool = False) -> None:
        super().__init__()
        self.chunk_size, self.weigh = chunk_size, weigh

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        parts = list(batch.chunks(self.chunk_size or len(batch)))
        values = torch.stack([self.terms(model, part).mean() for part in parts])
        if self.weigh:
            return (values * torch.tensor([len(part) / len(batch) for part in parts])).sum()
        return values.mean()


def test_chunks() -> None:
    assert "chunk_size=2" in failures(Chunked(), batch=data(5), only=["chunk_size"])["chunk_size"]
    report = check_regularizer(Chunked(weigh=True), net(), data(4), only=["chunk_size"])
    assert report["chunk_size"].status == "passed"


def test_another_value_than_the_reference() -> None:
    found = failures(penalty, reference=lambda model, batch: 2 * penalty(model, batch), only=["value"])
    assert "the reference gives" in found["value"]


def test_what_raises_is_a_failure_with_its_place() -> None:
    def broken(model: nn.Module, batch: gr.Batch) -> Tensor:
        if len(batch) == 1:
            raise KeyError("no such thing")
        return penalty(model, batch)

    found = failures(broken, only=["single_example"])
    assert "KeyError" in found["single_example"]
    assert "in broken" in found["single_example"]


# --- what passes ------------------------------------------------------------------------------------------------------------

QUICK = ["randomness", "additive", "permutation", "duplicates", "first_derivative", "no_side_effects", "state", "order"]


@pytest.mark.parametrize(
    "name",
    [
        "batch_norm_eval",
        "gru_tuple",
        "counting_buffer",
        "unused_and_frozen",
        "dropout_train",
    ],
)
def test_right_on_awkward_models(name: str) -> None:
    case = zoo.case(name)

    def right(model: nn.Module, batch: gr.Batch) -> Tensor:
        found = gr.gradients(model, batch, gr.logit(0), gr.Inputs(), differentiable=True)
        return found["inputs"].flatten(1).square().sum(1).mean()

    report = check_regularizer(right, case.make_model(), case.make_batch(), additive=True, only=QUICK)
    assert report["first_derivative"].status == "passed"


def test_kinks_are_retried() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    nn.init.zeros_(model[0].bias)
    batch = data()
    batch.inputs[0] = 0  # pre-activations exactly on the kink
    assert check_regularizer(penalty, model, batch, only=["first_derivative", "second_derivative", "gradgradcheck"]).ok


def test_inputs_that_require_grad_are_variables() -> None:
    made = torch.randn(4, 3, requires_grad=True)
    report = check_regularizer(penalty, net(), made * 2, only=["first_derivative", "second_derivative"])
    assert report["first_derivative"].detail.startswith("5 tensors")


def test_an_old_weight_norm_that_was_run_is_copied() -> None:
    with pytest.warns(FutureWarning):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))
    model(torch.randn(2, 3))
    assert check_regularizer(penalty, model, data(), only=["first_derivative", "permutation"]).ok


def test_nothing_of_the_users_is_touched() -> None:
    model, batch, regularizer = net().double(), data().to(torch.float64), InputGradient()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs, random = batch.inputs.clone(), torch.get_rng_state()
    check_regularizer(regularizer, model, batch)
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(inputs, batch.inputs)
    assert torch.equal(random, torch.get_rng_state())
    assert not batch.inputs.requires_grad
    assert regularizer._first_call


def test_warnings_of_the_first_call_are_passed_on() -> None:
    model = smooth_heads(2, nn.ReLU)
    with pytest.warns(ZeroSecondDerivativeWarning, match="exactly zero to the base"):
        report = check_regularizer(gr.regularizers.DiverseHeads(), model, small_batch(), only=["permutation"])
    assert "warned: DiverseHeads sends exactly zero" in str(report)


def test_properties_are_left_out_with_a_reason_only() -> None:
    report = check_regularizer(NormOfMean(), net(), data(), skip={"additive": "known"}, only=["additive", "order"])
    assert report["additive"].status == "skipped"
    assert "skipped  known" in str(report)
    with pytest.raises(GradregError, match="needs a reason"):
        check_regularizer(penalty, net(), data(), skip={"order": ""})
    with pytest.raises(GradregError, match=r"no property 'permutations'.*'permutation'"):
        check_regularizer(penalty, net(), data(), only=["permutations"])
    with pytest.raises(GradregError, match="at least two examples"):
        check_regularizer(penalty, net(), data(1))
