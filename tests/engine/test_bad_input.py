"""What cannot be right is refused by name, before any number comes out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import directional, gradients, plan
from gradreg.errors import (
    BatchError,
    CompatibilityError,
    CoupledExamplesError,
    DisconnectedWarning,
    GradregError,
    HeadsError,
    ScalarError,
    UnknownNameError,
)
from gradreg.model import SharedBase
from gradreg.scalars import all_logits, logit, loss, true_logit
from gradreg.testing import reference, zoo
from gradreg.testing.compare import assert_same
from gradreg.wrt import Activations, Features, Inputs, Outputs, Params

pytestmark = pytest.mark.filterwarnings("ignore::gradreg.errors.GradregWarning")

EVERY_KIND = pytest.mark.parametrize(
    "wrt", [Inputs(), Activations("0"), Outputs(), Params("*")], ids=["inputs", "activations", "outputs", "params"]
)
EVERY_DOOR = pytest.mark.parametrize("door", [gradients, plan], ids=["gradients", "plan"])


def mlp() -> tuple[nn.Module, Batch]:
    case = zoo.case("mlp")
    return case.make_model(), case.make_batch()


@EVERY_DOOR
@pytest.mark.parametrize(
    ("wrt", "found"),
    [
        (Params("0.wieght"), r"0\.weight"),
        (Params("0.*.*"), r"\*\*"),
        (Activations("9"), "'0'"),
        (Activations("1#4"), "1"),
        (Inputs("input"), "inputs"),
    ],
    ids=["parameter", "glob", "module", "call", "input"],
)
def test_wrong_names_with_the_closest_match(door: Any, wrt: Any, found: str) -> None:
    with pytest.raises(UnknownNameError, match=found):
        door(*mlp(), logit(0), wrt)


@EVERY_DOOR
@pytest.mark.parametrize(
    "options",
    [
        {"per": "examples"},
        {"route": "fast"},
        {"randomness": "none"},
        {"chunk_size": 0},
        {"chunk_size": 1.5},
        {"mean": True},
    ],
    ids=str,
)
def test_wrong_options(door: Any, options: dict[str, Any]) -> None:
    with pytest.raises(GradregError, match=next(iter(options))):
        door(*mlp(), logit(0), Inputs(), **options)


@EVERY_KIND
@pytest.mark.parametrize(
    "of",
    [
        lambda outputs, batch: outputs[:, 0].sum(),
        lambda outputs, batch: outputs[:, 0].sum()[None],
        lambda outputs, batch: outputs.T,
        lambda outputs, batch: outputs[:, 0] > 0,
        lambda outputs, batch: outputs.argmax(-1),
        lambda outputs, batch: 3.0,
        lambda outputs, batch: None,
    ],
    ids=["reduced", "reduced with an axis", "transposed", "flags", "integers", "number", "nothing"],
)
def test_scalars_of_a_wrong_shape_or_type(of: Any, wrt: Any) -> None:
    with pytest.raises(ScalarError, match=r"\[n\]|floating"):
        gradients(*mlp(), of, wrt)


@EVERY_KIND
def test_a_reduced_loss(wrt: Any) -> None:
    def reduced(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    with pytest.raises(ScalarError, match="reduc"):
        gradients(*mlp(), loss(reduced), wrt)


@pytest.mark.parametrize("of", [true_logit(), loss(F.cross_entropy)], ids=["true_logit", "loss"])
def test_missing_targets(of: Any) -> None:
    model, batch = mlp()
    with pytest.raises(ScalarError, match="targets"):
        gradients(model, batch.inputs, of, Inputs())


@EVERY_KIND
@pytest.mark.parametrize("label", [2, 7, -1])
def test_labels_out_of_range(label: int, wrt: Any) -> None:
    model, batch = mlp()
    targets = batch.targets.clone()
    targets[1] = label
    with pytest.raises(Exception, match=f"{label}|out of bounds"):
        gradients(model, Batch(batch.inputs, targets), loss(F.cross_entropy), wrt)


def test_empty_batch() -> None:
    model, batch = mlp()
    with pytest.raises(BatchError, match="empty"):
        gradients(model, torch.zeros(0, 3), logit(0), Inputs())
    with pytest.raises(BatchError, match="empty"):
        gradients(model, batch[:0], logit(0), Inputs())


@pytest.mark.parametrize("name", ["token_ids", "causal_language_model"])
def test_integer_inputs(name: str) -> None:
    case = zoo.case(name)
    with pytest.raises(BatchError, match="Activations"):
        gradients(case.make_model(), case.make_batch(), case.of, Inputs())


def test_one_integer_input_by_name() -> None:
    case = zoo.case("dict_inputs")
    for name in ("ids", "scale"):
        with pytest.raises(BatchError, match=name):
            gradients(case.make_model(), case.make_batch(), case.of, Inputs(name))


def test_features_of_a_plain_module() -> None:
    with pytest.raises(HeadsError, match="SharedBase"):
        gradients(*mlp(), logit(0), Features())


@pytest.mark.parametrize("wrt", ["inputs", Inputs, None, (), (Inputs(), "0.weight")], ids=str)
def test_wrt_that_is_no_description(wrt: Any) -> None:
    with pytest.raises(GradregError, match="wrt"):
        gradients(*mlp(), logit(0), wrt)


def test_of_and_model_that_are_none() -> None:
    model, batch = mlp()
    with pytest.raises(GradregError, match="callable"):
        gradients(model, batch, 3, Inputs())
    with pytest.raises(GradregError, match="Module"):
        gradients(lambda x: x, batch, logit(0), Inputs())


def test_groups_are_needed_for_groups() -> None:
    model, batch = mlp()
    with pytest.raises(BatchError, match="groups"):
        gradients(model, batch.inputs, logit(0), Params("*"), per="group")


def test_no_parameter_requires_grad() -> None:
    model, batch = mlp()
    model.requires_grad_(False)
    with pytest.raises(UnknownNameError, match="frozen"):
        gradients(model, batch, logit(0), Params("*"))
    assert_same(gradients(model, batch, logit(0), Inputs()), reference.gradients(model, batch, logit(0), Inputs()))
    found = gradients(model, batch, logit(0), Inputs(), differentiable=True)["inputs"]
    assert torch.allclose(found, reference.gradients(model, batch, logit(0), Inputs())["inputs"])


def test_frozen_parameter_by_name() -> None:
    case = zoo.case("unused_and_frozen")
    with pytest.raises(UnknownNameError, match=r"first\.bias"):
        gradients(case.make_model(), case.make_batch(), case.of, Params("first.bias"))


@EVERY_KIND
@pytest.mark.parametrize("route", ["auto", "loop"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_grad_mode_around_the_call_is_made_right(context: Any, route: str, wrt: Any) -> None:
    model, batch = mlp()
    expected = reference.gradients(model, batch, all_logits(), wrt)
    with context():
        found = gradients(model, batch, all_logits(), wrt, route=route)
        again = gradients(model, batch, all_logits(), wrt, route=route, differentiable=True)
    assert_same(found, expected)
    assert_same(again, expected)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_differentiable_result_under_no_grad_has_a_graph_or_is_refused(context: Any) -> None:
    model, batch = mlp()
    with context():
        try:
            found = gradients(model, batch, logit(0), Inputs(), differentiable=True)["inputs"]
        except CompatibilityError:
            return
    assert found.requires_grad
    slopes = torch.autograd.grad(found.pow(2).sum(), model[0].weight)[0]
    assert float(slopes.abs().max()) > 0


@EVERY_KIND
@pytest.mark.parametrize("differentiable", [False, True])
def test_inputs_made_under_inference_mode(differentiable: bool, wrt: Any) -> None:
    model, batch = mlp()
    with torch.inference_mode():
        made = Batch(batch.inputs * 1, batch.targets.clone())
    found = gradients(model, made, loss(F.cross_entropy), wrt, differentiable=differentiable)
    assert_same(found, reference.gradients(model, batch, loss(F.cross_entropy), wrt))


def test_parameters_made_under_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    with pytest.raises(GradregError, match="inference"):
        gradients(model, torch.zeros(2, 3), logit(0), Inputs())


@EVERY_KIND
def test_nan_stays_in_its_example(wrt: Any) -> None:
    model, batch = mlp()
    spoilt = batch.inputs.clone()
    spoilt[1, 0] = float("nan")
    found = gradients(model, spoilt, lambda outputs, _: outputs.pow(2).sum(-1), wrt)
    for value in found.values():
        assert value[1].isnan().any()
        assert torch.isfinite(value[[0, 2]]).all()


def batch_norm(*, first: bool) -> nn.Module:
    layers = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)]
    layers.insert(0 if first else 1, nn.BatchNorm1d(3))
    return nn.Sequential(*layers).double()


COUPLED = [
    (False, Inputs()),
    (False, Activations("0")),
    (False, Params("0.weight")),
    (False, Params("*")),
    (True, Inputs()),
    (False, (Outputs(), Inputs())),
]


@pytest.mark.parametrize("route", ["auto", "natural", "loop"])
@pytest.mark.parametrize(("first", "wrt"), COUPLED, ids=str)
def test_batch_norm_between_is_refused_by_name(first: bool, wrt: Any, route: str) -> None:
    if route == "natural":
        route = "vmap" if isinstance(wrt, Params) else "capture"
    with pytest.raises(GradregError, match="BatchNorm") as caught:
        gradients(batch_norm(first=first), torch.randn(4, 3).double(), logit(0), wrt, route=route)
    if route == "auto":
        assert isinstance(caught.value, CoupledExamplesError)
        assert ("'0'" if first else "'1'") in str(caught.value)
        assert "eval" in str(caught.value)


@pytest.mark.parametrize(
    ("first", "wrt"),
    [
        (True, Params("1.*")),
        (True, Params("3.*")),
        (False, Params("3.*")),
        (False, Outputs()),
        (False, Activations("2")),
    ],
    ids=str,
)
@pytest.mark.parametrize("differentiable", [False, True])
def test_batch_norm_upstream_is_fine(first: bool, wrt: Any, differentiable: bool) -> None:
    model, batch = batch_norm(first=first), torch.randn(4, 3).double()
    found = gradients(model, batch, all_logits(), wrt, differentiable=differentiable)
    assert_same(found, reference.gradients(model, batch, all_logits(), wrt))
    if differentiable:
        arguments = model, batch, all_logits(), wrt
        assert_same(
            reference.second_derivative(*arguments, gradients=gradients), reference.second_derivative(*arguments)
        )


def test_batch_norm_per_group_is_refused_and_per_batch_is_the_gradient_of_the_sum() -> None:
    model, inputs = batch_norm(first=False), torch.randn(4, 3).double()
    batch = Batch(inputs, groups=torch.tensor([0, 0, 1, 1]))
    with pytest.raises(CoupledExamplesError):
        gradients(model, batch, logit(0), Params("0.weight"), per="group")
    found = gradients(model, batch, logit(0), Params("0.weight"), per="batch")["0.weight"]
    (truth,) = torch.autograd.grad(model(inputs)[:, 0].sum(), [model[0].weight])
    assert torch.allclose(found, truth)


def test_batch_norm_in_heads_is_refused() -> None:
    case = zoo.case("batch_norm_eval_heads")
    model = case.make_model().train()
    for wrt in (Features(), Inputs()):
        with pytest.raises(CoupledExamplesError, match=r"heads\.0\.1"):
            gradients(model, case.make_batch(), case.of, wrt)


def test_batch_norm_between_is_refused_for_directions() -> None:
    inputs = torch.randn(4, 3).double()
    with pytest.raises(CoupledExamplesError):
        directional(batch_norm(first=False), inputs, logit(0), Inputs(), torch.randn(1, 4, 3).double())


def test_time_major_activations_are_refused_by_name() -> None:
    case = zoo.case("time_major")
    with pytest.raises(GradregError, match=r"'gru'.*batch_axis"):
        gradients(case.make_model(), case.make_batch(), case.of, Activations("gru"))


def test_time_major_activations_are_refused_when_time_is_as_long_as_the_batch() -> None:
    case = zoo.case("time_major")
    square = Batch(torch.randn(3, 3, 3).double())
    with pytest.raises(GradregError, match=r"'gru'.*batch_axis"):
        gradients(case.make_model(), square, case.of, Activations("gru"))
    wrt = Activations("gru", batch_axis=1)
    arguments = case.make_model(), square, case.of, wrt
    assert_same(gradients(*arguments), reference.gradients(*arguments))


class _SharedBias(nn.Module):
    """Has an activation that belongs to no example, as relative position biases do."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(2, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(x + self.bias(x.new_ones(len(BIAS_ROWS), 2)).mean(0)))
        return out


BIAS_ROWS = range(3)


def test_activations_without_examples_are_refused() -> None:
    model = _SharedBias().double()
    for n in (2, 3, 5):
        with pytest.raises(GradregError, match="'bias'"):
            gradients(model, torch.randn(n, 4).double(), logit(0), Activations("bias"))


def test_a_module_that_is_not_called() -> None:
    case = zoo.case("unused_and_frozen")
    with pytest.raises(GradregError, match="unused"):
        gradients(case.make_model(), case.make_batch(), case.of, Activations("unused"))
    found = gradients(case.make_model(), case.make_batch(), case.of, Activations("*"))
    assert set(found) == {"first", "last"}


class _Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize("options", [{}, {"route": "loop"}, {"per": "batch"}], ids=str)
@pytest.mark.parametrize("wrt", [Inputs(), Params("*")], ids=["inputs", "params"])
def test_detached_models_do_not_give_silent_zeros(wrt: Any, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DisconnectedWarning)
        with pytest.raises((GradregError, DisconnectedWarning), match=r"detach|graph"):
            gradients(_Detached(3, 2), torch.randn(2, 3), logit(0), wrt, **options)


@pytest.mark.parametrize("index", [2, -3])
def test_a_class_that_does_not_exist(index: int) -> None:
    for wrt in (Inputs(), Params("*")):
        with pytest.raises(ScalarError, match="2 classes"):
            gradients(*mlp(), logit(index), wrt)


def test_heads_of_unequal_shape() -> None:
    model = SharedBase(nn.Linear(3, 4), [nn.Linear(4, 2), nn.Linear(4, 3)])
    with pytest.raises(HeadsError, match="shape"):
        gradients(model, torch.zeros(2, 3), logit(0), Features())


def test_inputs_of_the_wrong_width_raise_what_the_model_raises() -> None:
    model, _ = mlp()
    for wrt in (Inputs(), Params("*")):
        with pytest.raises(RuntimeError, match="shape"):
            gradients(model, torch.zeros(2, 5).double(), logit(0), wrt)


def test_inputs_of_another_dtype_raise_what_the_model_raises() -> None:
    model, _ = mlp()
    with pytest.raises(RuntimeError, match="dtype"):
        gradients(model, torch.zeros(2, 3), logit(0), Inputs())


def test_complex_inputs() -> None:
    model, _ = mlp()
    with pytest.raises(GradregError):
        gradients(model, torch.zeros(2, 3, dtype=torch.complex128), logit(0), Inputs())


@pytest.mark.parametrize("name", [case.name for case in zoo.cases_with("attention") if "without" in case.name])
def test_the_attention_cases_need_their_kernel_replaced(name: str) -> None:
    """Plain torch refuses the second derivative here, so the zoo's attention cases test something."""
    case = zoo.case(name)
    model, batch = case.make_model(), case.make_batch()
    x = batch.inputs[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x, torch.zeros_like(batch.inputs[1])).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(first.pow(2).sum(), list(model.parameters()), allow_unused=True)


def test_a_compiled_model_is_refused_when_differentiable() -> None:
    model, batch = mlp()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(CompatibilityError, match="compile"):
        gradients(compiled, batch, logit(0), Inputs(), differentiable=True)


class _Centered(nn.Linear):
    """Couples examples without any BatchNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize("wrt", [Inputs(), Params("*")], ids=["inputs", "params"])
@pytest.mark.parametrize(
    ("layer", "of"),
    [(_Centered, logit(0)), (nn.Linear, lambda outputs, batch: outputs[:, 0].softmax(0))],
    ids=["in the model", "in the scalar"],
)
def test_examples_mixed_by_hand_are_refused(layer: type[nn.Linear], of: Any, wrt: Any) -> None:
    with pytest.raises(CoupledExamplesError):
        gradients(layer(3, 2).double(), torch.randn(4, 3).double(), of, wrt)


@pytest.mark.parametrize("of", [loss(F.cross_entropy), true_logit()], ids=["loss", "logit"])
@pytest.mark.parametrize("label", [-1, 2])
@pytest.mark.parametrize("count", [0, 2, 5])
def test_labels_outside_the_classes_are_named_whoever_finds_them(of: Any, label: int, count: int) -> None:
    heads = [nn.Linear(3, 2) for _ in range(count)]
    model = SharedBase(nn.Linear(3, 3), heads) if heads else nn.Linear(3, 2)
    batch = Batch(torch.randn(3, 3), torch.tensor([0, label, 1]))
    with pytest.raises(ScalarError, match=f"Label {label} of example 1"):
        gradients(model, batch, of, Inputs())
