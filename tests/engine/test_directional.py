"""Directional sums agree with inner products of explicit gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradreg.batch import Batch
from gradreg.engine import directional, gradients
from gradreg.errors import CoupledExamplesError, GradregError
from gradreg.scalars import all_logits
from gradreg.testing import reference, zoo
from gradreg.testing.compare import assert_same
from gradreg.wrt import Activations, Features, Inputs, Params

pytestmark = pytest.mark.filterwarnings("ignore::gradreg.errors.GradregWarning")

KEYS = ("inputs", "one", "params", "features", "activations", "several", "head_params", "base_activations")
COMBINATIONS = [
    pytest.param(case, key, id=f"{case.name}-{key}")
    for case in zoo.CASES
    # token_ids: torch leaves the padding row out of gradients, but not out of forward-mode derivatives
    if not case.tags & {"random", "float32", "bfloat16", "large"} and case.name != "token_ids"
    for key in KEYS
    if key in case.wrts and not (key == "several" and case.name in ("mlp", "five_heads"))  # they hold Outputs()
]


def directions_for(case: zoo.Case, wrt: Any, count: int) -> dict[str, Tensor]:
    """Random directions `[D, *value_shape]` for every key."""
    model, batch = case.make_model(), case.make_batch()
    generator = torch.Generator().manual_seed(7)
    found = {}
    for key, value in reference.gradients(model, batch, lambda outputs, b: _one_number(outputs), wrt).items():
        parameter = key in dict(model.named_parameters())
        with_heads = "heads" in case.tags and not parameter
        shape = value.shape[1:] if parameter else (len(batch), *value.shape[2 if with_heads else 1 :])
        found[key] = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return found


def _one_number(outputs: Any) -> Tensor:
    values = outputs
    if not isinstance(outputs, Tensor):
        values = outputs[-1] if isinstance(outputs, tuple) else getattr(outputs, "logits", None)
        if values is None:
            values = next(reversed(outputs.values()))
    return values.flatten(1).sum(1) if values.dim() > 1 else values


@pytest.mark.parametrize(("case", "key"), COMBINATIONS)
def test_values(case: zoo.Case, key: str) -> None:
    wrt = case.wrts[key]
    directions = directions_for(case, wrt, 2)
    arguments = case.make_model(), case.make_batch(), case.of, wrt, directions
    assert_same({"sums": directional(*arguments)}, {"sums": reference.directional(*arguments)})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("mlp", "inputs"),
        ("mlp", "params"),
        ("five_heads", "features"),
        ("bare_attention", "inputs"),
        ("gru_tuple", "inputs"),
    ],
)
def test_second_derivatives(name: str, key: str) -> None:
    case = zoo.case(name)
    wrt = case.wrts[key]
    directions = directions_for(case, wrt, 2)
    results = []
    for function in (directional, reference.directional):
        model = case.make_model()
        sums = function(model, case.make_batch(), case.of, wrt, directions, differentiable=True)
        names, parameters = zip(*model.named_parameters(), strict=True)
        slopes = torch.autograd.grad(
            reference.random_functional({"sums": sums}), parameters, allow_unused=True, materialize_grads=True
        )
        results.append(dict(zip(names, slopes, strict=True)))
    assert_same(*results)


def test_second_derivatives_through_normalizations() -> None:
    """torch's own reverse pass over a forward-mode pass is silently wrong through LayerNorm."""
    case = zoo.case("normalizations")
    results = []
    for function in (directional, reference.directional):
        model = case.make_model()
        directions = torch.ones(1, 3, 3).double()
        sums = function(model, case.make_batch(), case.of, Inputs(), directions, differentiable=True)
        slopes = torch.autograd.grad(reference.random_functional({"sums": sums}), list(model.parameters()))
        results.append({str(position): slope for position, slope in enumerate(slopes)})
    assert_same(*results)


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
def test_chunks_of_directions(chunk_size: int) -> None:
    case = zoo.case("five_heads")
    directions = directions_for(case, Inputs(), 3)
    arguments = case.make_model(), case.make_batch(), case.of, Inputs(), directions
    found = directional(*arguments, chunk_size=chunk_size)
    assert_same({"sums": found}, {"sums": reference.directional(*arguments)})


def test_a_bare_tensor_for_one_key_and_many_targets() -> None:
    case = zoo.case("mlp")
    direction = torch.randn(4, 3, 3).double()
    arguments = case.make_model(), case.make_batch(), all_logits(), Inputs()
    found = directional(*arguments, direction)
    assert found.shape == (3, 2, 4)
    assert torch.equal(found, directional(*arguments, {"inputs": direction}))


@pytest.mark.parametrize(
    ("key", "wrt"), [("inputs", Inputs()), ("0.weight", Params("0.weight")), ("0", Activations("0"))]
)
def test_at_other_values(key: str, wrt: Any) -> None:
    case = zoo.case("mlp")
    directions = directions_for(case, wrt, 2)
    at = {key: directions[key][0] * 0.5}
    arguments = case.make_model(), case.make_batch(), case.of, wrt, directions
    assert_same({"sums": directional(*arguments, at=at)}, {"sums": reference.directional(*arguments, at=at)})


@pytest.mark.parametrize(
    "directions",
    [{"other": torch.zeros(1, 3, 3).double()}, torch.zeros(1, 2, 3).double(), torch.zeros(3, 3).double(), {}],
    ids=["wrong key", "too few examples", "no axis of directions", "none"],
)
def test_wrong_directions(directions: Any) -> None:
    case = zoo.case("mlp")
    with pytest.raises(GradregError):
        directional(case.make_model(), case.make_batch(), case.of, Inputs(), directions)


def test_a_bare_tensor_for_several_keys() -> None:
    case = zoo.case("mlp")
    with pytest.raises(GradregError):
        directional(case.make_model(), case.make_batch(), case.of, Params("*"), torch.zeros(1, 4, 3).double())


def test_features_of_heads_have_an_axis_of_heads() -> None:
    case = zoo.case("five_heads")
    found = directional(case.make_model(), case.make_batch(), case.of, Features(), torch.randn(2, 3, 4).double())
    assert found.shape == (3, 5, 2)


def test_inputs_that_require_grad_stay_attached() -> None:
    case = zoo.case("mlp")
    results = []
    for function in (directional, reference.directional):
        source = case.make_batch().inputs.clone().requires_grad_()
        sums = function(
            case.make_model(), Batch(source), all_logits(), Inputs(), torch.ones(1, 3, 3).double(), differentiable=True
        )
        results.append({"source": torch.autograd.grad(reference.random_functional({"sums": sums}), source)[0]})
    assert_same(*results)


class Centered(torch.nn.Module):
    """Mixes examples."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True).square()


def test_mixed_examples_are_refused_in_forward_mode() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(CoupledExamplesError, match="another"):
        directional(Centered(), x, all_logits(), Inputs(), torch.ones(1, 4, 3, dtype=torch.float64), route="forward")


def test_examples_that_many_targets_mix_are_found_by_one_pullback() -> None:
    """The sum over all classes of a softmax is constant: a plain sum would hide what a weighted one shows."""
    x = torch.randn(4, 20, dtype=torch.float64)

    def of(outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs + outputs.roll(1, 0)).softmax(-1)

    with pytest.raises(CoupledExamplesError, match="another"):
        gradients(torch.nn.Identity(), x, of, Inputs())
    found = gradients(torch.nn.Identity(), x, lambda outputs, batch: outputs.softmax(-1), Inputs())
    assert found["inputs"].shape == (4, 20, 20)
