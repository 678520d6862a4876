"""Bases, heads and proximal steps of the experiments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradreg as gr
from gradreg.experiments.activations import ACTIVATIONS
from gradreg.experiments.bases import patch_components, trainable_layer, whitened_components
from gradreg.experiments.data import Data
from gradreg.experiments.heads import mlp_heads
from gradreg.experiments.proximal import SoftThreshold


@pytest.fixture
def make_data():
    def make(shape=(4, 6), boxes=(), count=300):
        targets = torch.arange(count) % 2
        size = torch.Size(shape).numel()
        inputs = (torch.randn(count, size) * torch.linspace(0.5, 3, size)).reshape(count, *shape)
        inputs = inputs + 5.0 * targets.reshape(-1, *[1] * len(shape))
        return Data(("a",), 2, gr.Batch(inputs, targets), {}, {}, {}, "", dict(boxes))

    return make


def white(features):
    count, size = features.shape
    torch.testing.assert_close(features.T @ features / count, torch.eye(size), atol=1e-3, rtol=0)
    return size


def test_components_are_white_and_ordered(make_data):
    data = make_data()
    features = whitened_components(data, components=5)(data.train.inputs)
    assert white(features) == 5
    with_label = torch.corrcoef(torch.stack([features[:, 0], data.train.targets.float()]))[0, 1]
    assert abs(with_label) > 0.9  # the classes differ along the direction of largest variance


def test_components_are_at_most_the_directions_that_vary(make_data):
    data = make_data((3,))
    data.train.inputs[:, 1] = 7.0
    assert white(whitened_components(data, components=48)(data.train.inputs)) == 2
    data.train.inputs[:] = 7.0
    with pytest.raises(gr.errors.GradregError, match="the same in all examples"):
        whitened_components(data)


@pytest.mark.parametrize(
    ("settings", "boxes", "patches"),
    [
        ({}, {"left": (0, 0, 4, 3), "right": (0, 3, 4, 3)}, 2),
        ({"height": 2, "width": 3}, {}, 4),
        ({}, {}, 1),
    ],
)
def test_each_feature_reads_one_patch(make_data, settings, boxes, patches):
    data = make_data(boxes=boxes)
    base = patch_components(data, components=8, **settings)
    assert base.matrix.shape == (24, 8)
    assert white(base(data.train.inputs)[:, : 8 // patches]) == 8 // patches
    read = (base.matrix != 0).sum(0)
    assert read.tolist() == [24 // patches] * 8
    where = {tuple(column.nonzero().flatten().tolist()) for column in base.matrix.T}
    assert len(where) == patches
    if boxes:
        assert (0, 1, 2, 6, 7, 8, 12, 13, 14, 18, 19, 20) in where  # left three columns of each of four rows


def test_channels_belong_to_the_same_patch(make_data):
    base = patch_components(make_data((2, 4, 4)), components=4, height=4, width=2)
    assert (base.matrix != 0).sum(0).tolist() == [16] * 4


def test_patches_must_fit(make_data):
    with pytest.raises(gr.errors.GradregError, match=r"3x3 .* do not fill inputs of the shape \[4, 6\]"):
        patch_components(make_data(), height=3, width=3)
    with pytest.raises(gr.errors.GradregError, match="components is 3, less than the 4 patches"):
        patch_components(make_data(), components=3, height=2, width=3)
    with pytest.raises(gr.errors.GradregError, match="use base=trainable"):
        whitened_components(make_data((10_001,), count=2))


def test_trainable_layer_on_a_frozen_base(make_data):
    data = make_data()
    base = trainable_layer(data, width=7)
    assert base(data.train.inputs).shape == (300, 7)
    assert base[0](data.train.inputs).std() == pytest.approx(1.0, abs=0.2)
    assert len(list(base.parameters())) == 2


def test_heads_differ_and_activations_are_named():
    first, second = mlp_heads(4, 3, count=2, width=5, activation="tanh")
    assert not torch.equal(first[0].weight, second[0].weight)
    assert first(torch.zeros(2, 4)).shape == (2, 3)
    assert all(len(mlp_heads(4, 3, count=1, activation=name)) == 1 for name in ACTIVATIONS)
    with pytest.raises(gr.errors.UnknownNameError, match="'softplus'"):
        mlp_heads(4, 3, activation="softplas")


def test_soft_threshold_minimizes_its_proximal_objective():
    model = nn.Linear(3, 2)
    before, bias = model.weight.detach().clone(), model.bias.detach().clone()
    SoftThreshold(strength=2.0, parameters="weight")(model, learning_rate=0.1)
    assert torch.equal(model.bias, bias)
    grid = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    cost = 0.5 * (grid - before.flatten().double()[:, None]) ** 2 + 0.2 * grid.abs()
    torch.testing.assert_close(model.weight.flatten().double(), grid[cost.argmin(1)], atol=2e-4, rtol=0)
    with pytest.raises(gr.errors.UnknownNameError, match="'weight'"):
        SoftThreshold(1.0, "wieght")(model, 0.1)
