"""Change how the work is put, demand the same answer: order, copies, other points, attached inputs."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import gradients
from gradreg.errors import GradregError, UnknownNameError
from gradreg.model import SharedBase
from gradreg.scalars import all_logits, logit, loss, top_logit
from gradreg.testing import reference, zoo
from gradreg.testing.compare import assert_same
from gradreg.wrt import Activations, Features, Inputs, Outputs, Params

pytestmark = pytest.mark.filterwarnings("ignore::gradreg.errors.GradregWarning")

EXACT = [case for case in zoo.CASES if not case.tags & {"random", "batch_statistics", "float32", "bfloat16", "large"}]
EVERY_CASE = pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)


def several(case: zoo.Case) -> tuple[Any, ...]:
    """Everything the case names, in one call."""
    items = [item for wrt in case.wrts.values() for item in (wrt if isinstance(wrt, tuple) else (wrt,))]
    return tuple(item for item in items if "#" not in getattr(item, "glob", ""))


@EVERY_CASE
def test_all_variables_at_once_also_of_permuted_and_duplicated_examples(case: zoo.Case) -> None:
    model, batch = case.make_model(), case.make_batch()
    straight = gradients(model, batch, case.of, several(case))
    assert_same(straight, reference.gradients(model, batch, case.of, several(case)))
    for rows in (torch.randperm(len(batch)), torch.tensor([0, len(batch) - 1, 0, 0])):
        found = gradients(model, batch[rows], case.of, several(case))
        assert_same(found, {key: value[rows] for key, value in straight.items()})


def shifted(case: zoo.Case, model: nn.Module, batch: Batch, keys: tuple[str, ...]) -> dict[str, Tensor]:
    """Values a little off those that the forward would have."""
    generator = torch.Generator().manual_seed(5)
    found: dict[str, Tensor] = {}
    for key in keys:
        if key in batch.named_inputs():
            value = batch.named_inputs()[key]
        elif key == "features":
            value = model.features(batch.inputs).detach()
        elif key in dict(model.named_parameters()):
            value = model.get_parameter(key).detach()
        else:
            shapes = reference.gradients(model, batch, all_logits(output=None), Activations(key))
            value = next(iter(shapes.values()))[:, 0]
        found[key] = value + 0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
    return found


AT = [
    ("mlp", Inputs(), ("inputs",)),
    ("mlp", Params("0.*"), ("0.weight", "0.bias")),
    ("mlp", Params("*"), ("2.weight",)),
    ("mlp", (Inputs(), Params("0.bias")), ("inputs", "0.bias")),
    ("mlp", Activations("0"), ("0",)),
    ("mlp", (Inputs(), Activations("0")), ("0",)),
    ("tied_weights", Params("*"), ("encoder.weight",)),
    ("two_names", Params("*"), ("first.weight",)),
    ("dict_inputs", Inputs(), ("b",)),
    ("tuple_inputs", Inputs(), ("0",)),
    ("gru_tuple", Params("gru.*"), ("gru.weight_hh_l0",)),
    ("residual_reused_norm", Activations("norm"), ("norm#1",)),
    ("two_heads", Features(), ("features",)),
    ("five_heads", Features(), ("features",)),
    ("five_heads", (Inputs(), Features()), ("inputs",)),
    ("five_heads", Params("*"), ("base.0.weight", "heads.3.0.bias")),
    ("unequal_heads", Features(), ("features",)),
    ("ensemble", Inputs(), ("inputs",)),
]


def at_values(name: str, keys: tuple[str, ...]) -> dict[str, Tensor]:
    case = zoo.case(name)
    if name == "residual_reused_norm":
        return {"norm#1": torch.linspace(-1, 1, 12).double().reshape(3, 4)}
    return shifted(case, case.make_model(), case.make_batch(), keys)


@pytest.mark.parametrize("route", ["auto", "loop"])
@pytest.mark.parametrize(("name", "wrt", "keys"), AT, ids=lambda value: value if isinstance(value, str) else None)
def test_at_other_values(name: str, wrt: Any, keys: tuple[str, ...], route: str) -> None:
    case, at = zoo.case(name), at_values(name, keys)
    arguments = case.make_model(), case.make_batch(), case.of, wrt
    found = gradients(*arguments, at=at, route=route)
    assert_same(found, reference.gradients(*arguments, at=at))
    here = reference.gradients(*arguments)
    assert any(not torch.allclose(found[key], here[key]) for key in found), "at had no effect: the test is idle"


@pytest.mark.parametrize(("name", "wrt", "keys"), AT, ids=lambda value: value if isinstance(value, str) else None)
def test_at_values_stay_attached(name: str, wrt: Any, keys: tuple[str, ...]) -> None:
    case = zoo.case(name)
    results = []
    for function in (gradients, reference.gradients):
        at = {key: value.requires_grad_() for key, value in at_values(name, keys).items()}
        found = function(case.make_model(), case.make_batch(), case.of, wrt, at=at, differentiable=True)
        number = reference.random_functional(found)
        slopes = torch.autograd.grad(number, list(at.values()), allow_unused=True, materialize_grads=True)
        results.append(dict(zip(at, slopes, strict=True)))
    assert_same(*results)
    assert any(float(value.abs().max()) > 0 for value in results[1].values())


@pytest.mark.parametrize("key", ["input", "1", "2.weight"])
def test_at_with_a_key_outside_wrt(key: str) -> None:
    case = zoo.case("mlp")
    with pytest.raises(UnknownNameError, match=key):
        gradients(case.make_model(), case.make_batch(), case.of, Inputs(), at={key: torch.zeros(3, 3).double()})


@pytest.mark.parametrize(
    ("wrt", "key", "value"),
    [
        (Inputs(), "inputs", torch.zeros(2, 3).double()),
        (Params("*"), "0.bias", torch.zeros(3).double()),
        (Activations("0"), "0", torch.zeros(3, 9).double()),
        (Inputs(), "inputs", torch.zeros(3, 3, dtype=torch.long)),
        (Inputs(), "inputs", 1.0),
    ],
    ids=["too few examples", "parameter shape", "activation shape", "integers", "number"],
)
def test_at_with_a_wrong_value(wrt: Any, key: str, value: Any) -> None:
    case = zoo.case("mlp")
    with pytest.raises(GradregError, match="at"):
        gradients(case.make_model(), case.make_batch(), case.of, wrt, at={key: value})


ATTACHED = ["mlp", "five_heads", "two_heads", "in_place_first", "ensemble", "bare_attention", "gru_tuple"]


@pytest.mark.parametrize("key", ["inputs", "params", "features"])
@pytest.mark.parametrize("name", ATTACHED)
def test_inputs_that_require_grad_stay_attached(name: str, key: str) -> None:
    case = zoo.case(name)
    wrt = case.wrts.get(key, Inputs())
    results = []
    for function in (gradients, reference.gradients):
        batch = case.make_batch()
        source = batch.inputs.clone().requires_grad_()
        generated = source.sin()  # a generator's output is no leaf
        found = function(
            case.make_model(),
            Batch(generated, batch.targets, batch.groups, batch.extras),
            case.of,
            wrt,
            differentiable=True,
        )
        results.append({"source": torch.autograd.grad(reference.random_functional(found), source)[0]})
    assert_same(*results)


def test_nested_gradients_give_third_order() -> None:
    """The gradient of a penalty on gradients, by calling the engine on the engine's own result."""
    case = zoo.case("mlp")
    model, batch = case.make_model(), case.make_batch()
    source = batch.inputs.clone().requires_grad_()
    first = gradients(model, Batch(source), logit(0), Inputs(), differentiable=True)["inputs"]
    (second,) = torch.autograd.grad(first.pow(2).sum(), source, create_graph=True)
    third = torch.autograd.grad(second.pow(2).sum(), list(model.parameters()), allow_unused=True)
    truth_source = batch.inputs.clone().requires_grad_()
    (truth_first,) = torch.autograd.grad(model(truth_source)[:, 0].sum(), truth_source, create_graph=True)
    (truth_second,) = torch.autograd.grad(truth_first.pow(2).sum(), truth_source, create_graph=True)
    truth = torch.autograd.grad(truth_second.pow(2).sum(), list(model.parameters()), allow_unused=True)
    for found, expected in zip(third, truth, strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.allclose(found, expected, rtol=1e-10, atol=1e-14)


def test_without_differentiable_nothing_is_attached() -> None:
    case = zoo.case("five_heads")
    batch = case.make_batch()
    attached = Batch(batch.inputs.clone().requires_grad_(), batch.targets)
    for wrt in case.wrts.values():
        assert not any(value.requires_grad for value in gradients(case.make_model(), attached, case.of, wrt).values())


def test_gradients_reach_the_parameters_through_backward() -> None:
    """`backward` leaves in `.grad` what autograd.grad returns, at the objects that the optimizer holds."""
    case = zoo.case("five_heads")
    model, batch = case.make_model(), case.make_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reference.random_functional(
        gradients(model, batch, case.of, (Features(), Params("base.*.*")), differentiable=True), 3
    ).backward()
    truth = reference.second_derivative(model, batch, case.of, (Features(), Params("base.*.*")), 3)
    assert_same({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, truth)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(truth)
    assert not any(p.grad.requires_grad for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["mlp", "five_heads"])
def test_a_tuple_a_mapping_and_a_batch_are_the_same(name: str) -> None:
    case = zoo.case(name)
    model, batch = case.make_model(), case.make_batch()
    expected = gradients(model, batch, logit(0), Inputs())
    for other in ((batch.inputs, batch.targets), [batch.inputs, batch.targets], batch.inputs):
        assert_same(gradients(model, other, logit(0), Inputs()), expected)


def test_wrapped_models_keep_their_names() -> None:
    case = zoo.case("mlp")
    model, batch = case.make_model(), case.make_batch()
    for key in ("several", "params"):
        found = gradients(nn.DataParallel(model), batch, case.of, case.wrts[key])
        assert_same(found, reference.gradients(model, batch, case.of, case.wrts[key]))


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 4),
    count=st.integers(1, 6),
    width=st.integers(1, 4),
    classes=st.integers(1, 4),
    of=st.sampled_from([all_logits(), logit(0), top_logit(), loss(F.cross_entropy)]),
    wrt=st.sampled_from([Inputs(), Features(), Outputs(), Params("*"), Activations("base"), Activations("heads.*.0")]),
)
def test_any_size(n: int, count: int, width: int, classes: int, of: Any, wrt: Any) -> None:
    heads = [nn.Sequential(nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, classes)) for _ in range(count)]
    model = SharedBase(nn.Linear(2, width), heads).double()
    batch = Batch(torch.randn(n, 2).double(), torch.randint(0, classes, (n,)))
    assert_same(gradients(model, batch, of, wrt), reference.gradients(model, batch, of, wrt))


@pytest.mark.parametrize("route", ["auto", "vmap", "loop"])
def test_of_may_read_extras_and_close_over_nothing(route: str) -> None:
    case = zoo.case("counting_buffer")
    model, batch = case.make_model(), case.make_batch()
    doubled = Batch(batch.inputs, extras={"weight": 2 * batch.extras["weight"]})
    found = gradients(model, doubled, case.of, Params("*"), route=route)
    expected = {key: 2 * value for key, value in reference.gradients(model, batch, case.of, Params("*")).items()}
    assert_same(found, expected)
