"""What decides the numbers is described by values that no process changes."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradreg as gr
from gradreg.tracin.index._describe import describe


def make(scale, sign=1):
    def scalar(outputs, batch):
        return sign * scale * outputs.sum(1)

    return scalar


def test_same_functions_are_equal_and_others_are_not():
    assert describe(make(2.0)) == describe(make(2.0))
    assert describe(make(2.0)) != describe(make(3.0))
    assert describe(make(2.0)) != describe(make(2.0, sign=-1))
    assert describe(lambda o, b: o.sum(1)) != describe(lambda o, b: o.mean(1))
    assert describe(functools.partial(make, 2.0)) != describe(functools.partial(make, 3.0))
    assert describe(make(torch.ones(2))) != describe(make(torch.zeros(2)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (gr.loss(F.cross_entropy), gr.loss(F.mse_loss)),
        (gr.loss(F.cross_entropy), gr.loss(F.cross_entropy, mean=True)),
        (gr.logit(0), gr.logit(1)),
        (gr.loss(nn.CrossEntropyLoss()), gr.loss(nn.CrossEntropyLoss(label_smoothing=0.1))),
        (gr.true_logit(), gr.margin()),
    ],
)
def test_scalars(first, second):
    assert describe(first) == describe(first)
    assert describe(first) != describe(second)


def test_plain_values_without_addresses():
    text = json.dumps(
        describe([gr.loss(F.cross_entropy), gr.loss(nn.CrossEntropyLoss()), make(2.0), Nothing(), {"a": {1, 2}}])
    )
    assert "0x" not in text
    assert "cross_entropy" in text


class Nothing:
    """Shown by its address."""

    def __call__(self, outputs, batch):
        return outputs.sum(1)
