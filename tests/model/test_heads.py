"""SharedBase and Ensemble are ordinary modules: the same numbers as a Python loop over their heads."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from gradreg.errors import GradregWarning, HeadsError
from gradreg.model import Ensemble, SharedBase
from gradreg.testing import reference, zoo
from gradreg.testing.compare import assert_same

HEADS = [case for case in zoo.cases_with("heads") if "random" not in case.tags]
SHARED = [case for case in HEADS if isinstance(case.make_model(), SharedBase)]


def arguments(case: zoo.Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = case.make_batch().inputs
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    return (inputs, {}) if isinstance(inputs, tuple) else ((), dict(inputs))


def looped(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """One head after the other, each on a copy of its input."""
    if isinstance(model, SharedBase):
        features = model.features(*args, **kwargs)
        return torch.stack([head(features.clone()) for head in model.heads], 1)
    return torch.stack([member(*args, **kwargs) for member in model.models], 1)


@pytest.mark.parametrize("case", HEADS, ids=lambda case: case.name)
def test_forward_and_its_gradients_are_those_of_a_loop(case: zoo.Case) -> None:
    args, kwargs = arguments(case)
    results = []
    for run in (lambda model: model(*args, **kwargs), lambda model: looped(model, args, kwargs)):
        model = case.make_model()
        outputs = run(model)
        number = reference.random_functional({"outputs": outputs})
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        slopes = torch.autograd.grad(number, list(named.values()), allow_unused=True, materialize_grads=True)
        results.append({"outputs": outputs} | dict(zip(named, slopes, strict=True)) | dict(model.named_buffers()))
    assert_same(*results, tolerance=1e-12)


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_the_base_runs_once(case: zoo.Case) -> None:
    model = case.make_model()
    args, kwargs = arguments(case)
    calls: list[int] = []
    model.base.register_forward_hook(lambda *_: calls.append(1))
    model(*args, **kwargs)
    assert calls == [1]


@pytest.mark.parametrize("case", HEADS, ids=lambda case: case.name)
def test_state_dict_round_trip_and_copies(case: zoo.Case) -> None:
    model, other = case.make_model(), case.make_model()
    args, kwargs = arguments(case)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    other.load_state_dict(model.state_dict())
    names = {name.split(".")[0] for name in model.state_dict()}
    assert names <= ({"base", "heads"} if isinstance(model, SharedBase) else {"models"})
    copied = copy.deepcopy(model)
    outputs = model(*args, **kwargs)
    assert torch.equal(outputs, other(*args, **kwargs))
    assert torch.equal(outputs, copied(*args, **kwargs))


def plain(count: int, width: int = 4, classes: int = 2) -> SharedBase:
    heads = [nn.Sequential(nn.Linear(width, 3), nn.Softplus(), nn.Linear(3, classes)) for _ in range(count)]
    return SharedBase(nn.Sequential(nn.Linear(5, width), nn.Tanh()), heads).double()


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 4), count=st.integers(1, 7), width=st.integers(1, 5), classes=st.integers(1, 4))
def test_shapes(n: int, count: int, width: int, classes: int) -> None:
    model, x = plain(count, width, classes), torch.randn(n, 5).double()
    assert model.features(x).shape == (n, width)
    assert model(x).shape == (n, count, classes)
    assert torch.allclose(model(x), looped(model, (x,), {}))


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 3), count=st.integers(1, 6), tail=st.lists(st.integers(1, 3), max_size=3))
def test_outputs_of_any_shape(n: int, count: int, tail: list[int]) -> None:
    size = int(torch.tensor([1, *tail]).prod())
    heads = [nn.Sequential(nn.Linear(4, size), nn.Unflatten(1, tuple(tail or [1]))) for _ in range(count)]
    assert SharedBase(nn.Identity(), heads)(torch.zeros(n, 4)).shape == (n, count, *(tail or [1]))


@pytest.mark.parametrize("count", [2, 5])
def test_the_optimizer_moves_every_head(count: int) -> None:
    model, x = plain(count), torch.randn(3, 5).double()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).pow(2).sum().backward()
    optimizer.step()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("count", [2, 5])
def test_in_place_heads_leave_features_and_each_other_alone(count: int) -> None:
    heads = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2)) for _ in range(count)]
    model = SharedBase(nn.Identity(), heads)
    x = torch.randn(3, 4)
    kept = x.clone()
    outputs = model(x)
    assert torch.equal(x, kept)
    assert torch.allclose(outputs, torch.stack([head[1](kept.relu()) for head in heads], 1))


class _InPlaceByFunction(nn.Module):
    """Changes its input without a module that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x.relu_())
        return out


@pytest.mark.parametrize("count", [2, 5])
def test_heads_in_place_by_a_function(count: int) -> None:
    model = SharedBase(nn.Identity(), [_InPlaceByFunction() for _ in range(count)])
    x = torch.randn(3, 4)
    kept = x.clone()
    outputs = model(x)
    assert torch.equal(x, kept)
    assert torch.allclose(outputs, torch.stack([head.last(kept.relu()) for head in model.heads], 1))


@pytest.mark.parametrize("count", [2, 5])
def test_dropout_differs_between_heads_and_stops_in_eval(count: int) -> None:
    heads = [nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 1, bias=False)) for _ in range(count)]
    for head in heads:
        nn.init.ones_(head[1].weight)
    model = SharedBase(nn.Identity(), heads)
    outputs = model(torch.rand(1, 40))
    assert len(set(outputs.flatten().tolist())) == count
    model.eval()
    assert len(set(model(torch.ones(1, 40)).flatten().tolist())) == 1


@pytest.mark.parametrize("count", [2, 5])
def test_train_mode_batch_norm_in_heads_keeps_its_own_statistics(count: int) -> None:
    model = SharedBase(nn.Identity(), [nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(count)])
    x = torch.randn(6, 4)
    model(x)
    means = [head[1].running_mean for head in model.heads]
    for head, mean in zip(model.heads, means, strict=True):
        assert torch.allclose(mean, 0.1 * head[0](x).mean(0), atol=1e-6)
        assert int(head[1].num_batches_tracked) == 1


def test_heads_that_change_between_calls() -> None:
    """What was decided for one call must not hold for the next."""
    model, x = plain(5), torch.randn(3, 5).double()
    model(x)
    model.heads[2][1] = nn.Tanh()
    assert torch.allclose(model(x), looped(model, (x,), {}))
    model.heads[3].register_forward_hook(lambda module, args, output: -output)
    assert torch.allclose(model(x), looped(model, (x,), {}))
    model.heads[4][0].weight = model.heads[1][0].weight
    assert torch.allclose(model(x), looped(model, (x,), {}))
    model.heads[0].forward = lambda features: torch.zeros(3, 2).double()
    assert torch.allclose(model(x), looped(model, (x,), {}))


def test_heads_that_share_a_parameter() -> None:
    model, x = plain(5), torch.randn(3, 5).double()
    for head in model.heads:
        head[2].weight = model.heads[0][2].weight
    (found,) = torch.autograd.grad(model(x).sin().sum(), [model.heads[0][2].weight])
    (truth,) = torch.autograd.grad(looped(model, (x,), {}).sin().sum(), [model.heads[0][2].weight])
    assert torch.allclose(found, truth)


def test_one_head_object_in_several_places() -> None:
    head = nn.Linear(4, 2)
    for count in (2, 5):
        with pytest.warns(GradregWarning, match="never differ"):
            model, x = SharedBase(nn.Identity(), [head] * count), torch.randn(3, 4)
        assert torch.allclose(model(x), head(x).unsqueeze(1).expand(3, count, 2))


class _ClosedOver(nn.Module):
    """Uses a module that it does not register."""

    def __init__(self, hidden: nn.Module) -> None:
        super().__init__()
        self.hidden = [hidden]
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.hidden[0](x))
        return out


def test_heads_with_unregistered_parts() -> None:
    model, x = SharedBase(nn.Identity(), [_ClosedOver(nn.Linear(4, 4)) for _ in range(5)]), torch.randn(3, 4)
    assert torch.allclose(model(x), looped(model, (x,), {}))


class _PlainTensor(nn.Module):
    """Holds a tensor that is neither a parameter nor a buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = torch.tensor([scale, 1.0, 1.0, 1.0])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x * self.scale)
        return out


def test_heads_with_plain_tensors() -> None:
    model, x = SharedBase(nn.Identity(), [_PlainTensor(float(k)) for k in range(5)]), torch.randn(3, 4)
    assert torch.allclose(model(x), looped(model, (x,), {}))


@pytest.mark.parametrize("select", [1, -1, lambda output: output[1]], ids=["position", "from the end", "function"])
def test_select(select: Any) -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x + 1

    model = SharedBase(Pair(), [nn.Identity()], select=select)
    assert torch.equal(model.features(torch.zeros(2, 3)), torch.ones(2, 3))


def test_bad_heads() -> None:
    with pytest.raises(HeadsError, match="empty"):
        SharedBase(nn.Identity(), [])
    with pytest.raises(HeadsError, match="empty"):
        Ensemble([])
    with pytest.raises(HeadsError, match="function"):
        SharedBase(nn.Identity(), [nn.Identity(), torch.tanh])
    with pytest.raises(HeadsError, match=r"\(2, 3\).*\(2, 2\)"):
        SharedBase(nn.Identity(), [nn.Linear(4, 2), nn.Linear(4, 3)])(torch.zeros(2, 4))


def test_bad_select() -> None:
    lstm = nn.LSTM(3, 4)
    with pytest.raises(HeadsError, match="select"):
        SharedBase(lstm, [nn.Identity()])(torch.zeros(2, 2, 3))
    with pytest.raises(HeadsError, match="tuple"):
        SharedBase(lstm, [nn.Identity()], select=1)(torch.zeros(2, 2, 3))
    with pytest.raises(HeadsError, match="select=7"):
        SharedBase(lstm, [nn.Identity()], select=7)(torch.zeros(2, 2, 3))
    with pytest.raises(HeadsError, match="'x'"):
        SharedBase(nn.Linear(3, 4), [nn.Identity()], select="x")(torch.zeros(2, 3))


def test_faults_of_a_head_are_raised_as_they_are() -> None:
    model = SharedBase(nn.Identity(), [nn.Linear(4, 2) for _ in range(5)])
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.zeros(2, 3))
    assert model(torch.zeros(2, 4)).shape == (2, 5, 2)


def test_pickle() -> None:
    model, x = plain(5), torch.randn(3, 5).double()
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_repr_shows_what_is_selected() -> None:
    assert "select=1" in repr(SharedBase(nn.Identity(), [nn.Identity()], select=1))
