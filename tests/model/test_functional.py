"""A module as a function of its tensors: every place of a tied one is swapped, and everything is put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradreg.errors import UnknownNameError
from gradreg.model import cloned_buffers, parameter_aliases, preserved, swapped
from gradreg.testing import zoo

CASES = pytest.mark.parametrize("case", zoo.CASES, ids=lambda case: case.name)


def identities(model: nn.Module) -> dict[str, int]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: id(tensor) for name, tensor in tensors}


def _places(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter under all its names."""
    return dict(model.named_parameters(remove_duplicate=False))


@CASES
def test_all_is_put_back(case: zoo.Case) -> None:
    model = case.make_model()
    before = identities(model)
    aliases = parameter_aliases(model)
    doubles = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    with swapped(model, {**doubles, **cloned_buffers(model)}):
        inside = identities(model)
        assert not set(inside.values()) & set(before.values())
        assert all(tensor is doubles[aliases[name]] for name, tensor in _places(model).items())
    assert identities(model) == before


@CASES
def test_all_is_put_back_after_a_fault(case: zoo.Case) -> None:
    model = case.make_model()
    before = identities(model)
    doubles = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    with pytest.raises(KeyError), swapped(model, doubles):
        raise KeyError
    assert identities(model) == before


def test_one_module_under_two_names() -> None:
    """torch.func.functional_call leaves the temporary tensor behind here (pytorch/pytorch#164759)."""
    case = zoo.case("two_names")
    model, x = case.make_model(), case.make_batch().inputs
    original = model.first.weight
    new = torch.randn_like(original)
    with swapped(model, {"first.weight": new}):
        assert model.first.weight is new
        assert model.second.weight is new
        outputs = model(x)
    assert model.first.weight is original
    with torch.no_grad():
        original.copy_(new)
    assert torch.allclose(model(x), outputs)


def test_tied_weights_get_the_gradient_of_all_uses() -> None:
    case = zoo.case("tied_weights")
    model, x = case.make_model(), case.make_batch().inputs
    value = model.encoder.weight.detach().clone().requires_grad_()
    with swapped(model, {"encoder.weight": value}):
        (found,) = torch.autograd.grad(model(x).sin().sum(), value)
    (truth,) = torch.autograd.grad(model(x).sin().sum(), model.encoder.weight)
    assert torch.allclose(found, truth)


def test_recurrent_layers_read_the_swapped_weights() -> None:
    case = zoo.case("gru_tuple")
    model, x = case.make_model(), case.make_batch().inputs
    before = model(x)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters() if name.startswith("gru")}
    with swapped(model, zeros):
        assert not torch.allclose(model(x), before)
    assert torch.equal(model(x), before)


def test_unknown_names_are_refused() -> None:
    with (
        pytest.raises(UnknownNameError, match=r"'0\.weight'"),
        swapped(zoo.case("mlp").make_model(), {"0.wieght": None}),
    ):
        pass


def test_aliases() -> None:
    assert parameter_aliases(zoo.case("tied_weights").make_model()) == {
        "encoder.weight": "encoder.weight",
        "decoder.weight": "encoder.weight",
        "decoder.bias": "decoder.bias",
    }
    aliases = parameter_aliases(zoo.case("two_names").make_model())
    assert aliases["second.weight"] == "first.weight"


@pytest.mark.parametrize(
    "case", [*zoo.cases_with("writes_buffers"), zoo.case("dropout_train")], ids=lambda case: case.name
)
def test_preserved_runs_leave_no_trace(case: zoo.Case) -> None:
    model, batch = case.make_model(), case.make_batch()
    before, random_state = identities(model), torch.get_rng_state()
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with preserved(model, set()):
        model(batch.inputs)
    assert identities(model) == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(buffer, values[name]) for name, buffer in model.named_buffers())


def test_attributes_are_put_back_by_identity() -> None:
    net = nn.Linear(2, 2)
    first, kept = torch.zeros(2), torch.zeros(2)
    net.cache, net.kept = first, kept
    with preserved(net, set()):
        net.cache = torch.zeros(2)  # equal, but another tensor
        del net.kept
        net.new = 1
        net.training = False
    assert (net.cache is first, net.kept is kept, net.training) == (True, True, True)
    assert not hasattr(net, "new")


def drawn_then_failed() -> None:
    torch.rand(3)
    raise ZeroDivisionError


def test_random_streams_are_put_back_after_a_fault() -> None:
    net = nn.Linear(2, 2)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), preserved(net, set()):
        drawn_then_failed()
    assert torch.equal(torch.get_rng_state(), before)
