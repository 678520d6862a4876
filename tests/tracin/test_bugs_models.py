"""The bug table of other tools, rows 11 to 20 and 32: modes, side effects, shared and bare parameters, layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

import gradreg as gr
from gradreg.errors import CompatibilityError, CoupledExamplesError
from tests.tracin.toy import (
    TEST,
    TRAIN,
    YT,
    Reused,
    Scaled,
    Tied,
    Unused,
    X,
    Y,
    assert_scores,
    assert_table,
    brute,
    brute_gradients,
    made,
    toy_model,
    tracin,
)


def test_row_11_dropout_is_in_eval_mode() -> None:
    model = made(lambda: nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)))
    assert model[1].training
    ours = tracin(model)
    for _ in range(2):
        assert_table(ours.influence(TRAIN, TEST), -0.500462, 6.086248)
        assert all(module.training for module in model.modules())


def test_row_11_dropout_that_ignores_the_mode_is_refused() -> None:
    class Always(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.a(x), 0.5)

    model = made(Always)
    with pytest.raises(CompatibilityError, match=r"Always .* draws random numbers in eval mode"):
        tracin(model).influence(TRAIN, TEST)


@pytest.mark.parametrize("chunk_size", [1, 4, 11])
def test_row_12_batch_norm_is_in_eval_mode(chunk_size: int) -> None:
    model = made(lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)))
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    assert_table(tracin(model, chunk_size=chunk_size).influence(TRAIN, TEST), -0.691319, 7.402165)
    assert model[1].training
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())


def test_row_12_batch_norm_without_statistics_is_refused_by_name() -> None:
    model = made(lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7, track_running_stats=False), nn.Linear(7, 3)))
    with pytest.raises(CoupledExamplesError, match="Module '1' normalizes over the batch"):
        tracin(model).influence(TRAIN, TEST)


class TwoNames(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = self.first
        self.c = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class State:
    """All that a call must leave as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.objects = list(model.named_parameters(remove_duplicate=False)) + list(model.named_buffers())
        self.values = [value.detach().clone() for _, value in self.objects]
        self.versions = [value._version for _, value in self.objects]
        self.grads = [value.grad for _, value in self.objects]
        self.flags = [(module, module.training, dict(vars(module))) for module in model.modules()]
        self.random = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())

    def assert_unchanged(self) -> None:
        now = list(self.model.named_parameters(remove_duplicate=False)) + list(self.model.named_buffers())
        assert [name for name, _ in now] == [name for name, _ in self.objects]
        for (_, new), (_, old), value, version, grad in zip(
            now, self.objects, self.values, self.versions, self.grads, strict=True
        ):
            assert new is old
            assert new._version == version
            assert torch.equal(new, value)
            assert new.grad is grad
        assert all(isinstance(parameter, nn.Parameter) for parameter in self.model.parameters())
        for module, training, attributes in self.flags:
            assert module.training is training
            assert vars(module).keys() == attributes.keys()
        assert torch.equal(torch.get_rng_state(), self.random[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == self.random[1:]


def mixed_mode() -> nn.Module:
    """Train flags that differ between modules, buffers, and a `.grad`."""
    model = made(lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 3)))
    model[1].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    return model


@pytest.mark.parametrize(
    "build", [lambda: made(TwoNames), mixed_mode, lambda: made(Tied)], ids=["names", "modes", "tied"]
)
def test_rows_13_14_the_model_is_left_as_it_was(build: Callable[[], nn.Module]) -> None:
    model = build()
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    both = [gr.Checkpoint(model.state_dict(), 0.1), gr.Checkpoint(other.state_dict(), 0.2)]
    ours = gr.TracIn(model, gr.loss(F.cross_entropy), both)
    state = State(model)
    scores = ours.influence(TRAIN, TEST)
    state.assert_unchanged()
    assert_scores(scores, 0.1 * brute(model) + 0.2 * brute(other))
    for call in (
        lambda: ours.self_influence(TRAIN),
        lambda: ours.top_k(TRAIN, TEST, 2),
        lambda: ours.influence(TRAIN, TEST, aggregate=True),
    ):
        call()
        state.assert_unchanged()


@pytest.mark.parametrize("fails_at", [0, 2, 5])
def test_row_14_the_model_is_left_as_it_was_after_an_exception(fails_at: int) -> None:
    model = mixed_mode()
    calls = 0

    def of(outputs: Tensor, batch: gr.Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > fails_at:
            raise RuntimeError("broken on purpose")
        return F.cross_entropy(outputs, batch.targets, reduction="none")

    halved = {name: value / 2 for name, value in model.state_dict().items() if value.is_floating_point()}
    ours = gr.TracIn(
        model, of, [gr.Checkpoint({**model.state_dict(), **halved}, 0.1), gr.Checkpoint(model.state_dict(), 1)]
    )
    state = State(model)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        ours.influence(TRAIN, TEST)
    state.assert_unchanged()


def test_row_14_nor_does_a_checkpoint_that_does_not_fit_change_it() -> None:
    model = toy_model()
    wider = made(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))
    ours = gr.TracIn(
        model, gr.loss(F.cross_entropy), [gr.Checkpoint(model.state_dict(), 1), gr.Checkpoint(wider.state_dict(), 1)]
    )
    state = State(model)
    with pytest.raises(gr.errors.CheckpointError, match=r"0.weight \(\(8, 5\), in the model \(7, 5\)\)"):
        ours.influence(TRAIN, TEST)
    state.assert_unchanged()


def test_row_15_construction_draws_nothing() -> None:
    model = toy_model()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    tracin(model, projection=gr.tracin.TwoSidedProjection(2, 2))
    assert torch.equal(torch.rand(3), expected)


def test_row_16_tied_weights() -> None:
    model = made(Tied)
    ours = tracin(model)
    found = ours.influence(TRAIN, TEST)
    assert_table(found, -0.442345, 17.197164)
    assert_scores(found, brute(model))
    assert ours.coverage.covered == 53
    assert [item.name for item in ours.coverage.parameters] == ["a.weight", "a.bias", "b.bias", "c.weight", "c.bias"]


def test_row_17_a_module_called_twice() -> None:
    found = tracin(made(Reused)).influence(TRAIN, TEST)
    assert_table(found, -0.144441, 21.026475)
    assert_scores(found, brute(made(Reused)))


def test_row_18_a_bare_parameter() -> None:
    ours = tracin(made(Scaled))
    assert_table(ours.influence(TRAIN, TEST), -0.291036, 8.976779)
    assert ours.coverage.covered == 73
    assert ours.coverage.fraction == 1.0
    assert "73 of 73 parameters (100.0%)" in str(ours.coverage)
    layers = ours.influence(TRAIN, TEST, per="layer")
    assert set(layers) == {"a", "b", "scale"}
    assert_scores(torch.stack(list(layers.values())).sum(0), brute(made(Scaled)))


def test_row_18_an_unused_layer() -> None:
    ours = tracin(made(Unused))
    assert_table(ours.influence(TRAIN, TEST), 0.024095, -5.131223)
    assert not ours.influence(TRAIN, TEST, per="layer")["idle"].any()


def test_row_18_a_frozen_weight_is_listed_as_left_out() -> None:
    model = toy_model()
    model[0].weight.requires_grad_(False)
    ours = tracin(model)
    assert_table(ours.influence(TRAIN, TEST), -0.603918, 5.037685)
    left_out = {item.name: item.reason for item in ours.coverage.parameters if item.rule is None}
    assert left_out == {"0.weight": "frozen (requires_grad=False)"}
    assert ours.coverage.covered == 66 - 35
    assert "0.weight: 35 (53.0%), left out: frozen" in str(ours.coverage)


def test_row_18_parameters_that_are_not_selected_are_listed() -> None:
    model = toy_model()
    ours = tracin(model, params=["2.*"])
    G, T = brute_gradients(model, *TRAIN)[:, 42:], brute_gradients(model, *TEST)[:, 42:]
    assert_scores(ours.influence(TRAIN, TEST), T @ G.T)
    assert [item.reason for item in ours.coverage.parameters] == ["not selected by params"] * 2 + [""] * 2
    with pytest.raises(gr.errors.UnknownNameError, match="head"):
        tracin(model, params="head.*")


def test_row_19_a_mixed_bias() -> None:
    model = made(lambda: nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3)))
    assert_table(tracin(model).influence(TRAIN, TEST), -0.064535, 5.226162)


CONVOLUTIONS: dict[str, tuple[dict[str, Any], int, float, float]] = {
    "groups": ({"groups": 2}, 36, -0.758087, 0.397572),
    "circular": ({"padding": 1, "padding_mode": "circular"}, 100, -0.059982, 11.521239),
    "same": ({"padding": "same"}, 100, -1.137352, 6.234579),
    "stride": ({"stride": 2}, 16, -0.291189, 2.191999),
    "dilation": ({"dilation": 2}, 4, -0.638871, -1.680426),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_row_20_options_of_convolutions(name: str) -> None:
    options, size, first, total = CONVOLUTIONS[name]
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(6, 2, 5, 5, generator=generator, dtype=torch.float64)
    others = torch.randn(3, 2, 5, 5, generator=generator, dtype=torch.float64)
    model = made(lambda: nn.Sequential(nn.Conv2d(2, 4, 3, **options), nn.Tanh(), nn.Flatten(), nn.Linear(size, 3)))
    train, test = (images, Y[:6]), (others, YT[:3])
    found = tracin(model).influence(train, test)
    assert_table(found, first, total)
    assert_scores(found, brute(model, train, test))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.rnn(x.unsqueeze(1))[0][:, -1])
        return out


class Block(nn.Module):
    """A block whose activations are recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(recomputed(self.inner, x, use_reentrant=False))
        return out


@pytest.mark.parametrize("build", [Recurrent, Block], ids=["GRU", "checkpointed"])
@pytest.mark.filterwarnings("ignore::gradreg.errors.SlowRouteWarning")
def test_row_32_what_vmap_refuses(build: Callable[[], nn.Module]) -> None:
    model = made(build)
    data, test = (X[:4], Y[:4]), (X[4:6], Y[4:6])
    ours = tracin(model)
    assert_scores(ours.influence(data, test), brute(model, data, test))
    assert ours.coverage.fraction == 1.0
    assert all(item.rule for item in ours.coverage.parameters)
