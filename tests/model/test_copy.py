"""Copies of modules that deepcopy refuses, or should."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from gradreg.errors import CompatibilityError
from gradreg.model import copied


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_old_norms_after_a_forward(norm: object) -> None:
    model = nn.Sequential(norm(nn.Linear(3, 4)), nn.Tanh()).eval()
    x = torch.randn(2, 3)
    before = model(x)
    other = copied(model)
    assert torch.equal(other(x), before)
    first = next(other.parameters())
    first.data.mul_(0)
    assert torch.equal(model(x), before)
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_ties_flags_hooks_and_buffers_are_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    model[2].weight = model[0].weight
    model[1].eval()
    model[0].bias.requires_grad_(False)
    calls: list[int] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    other = copied(model)
    assert other[2].weight is other[0].weight
    assert other[0].weight is not model[0].weight
    assert not other[1].training
    assert not other[0].bias.requires_grad
    other(torch.zeros(2, 3).double())
    assert calls == [1]


def test_a_kept_activation_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].last = model(torch.zeros(2, 3))
    with pytest.raises(CompatibilityError, match=r"0\.last is a tensor with a graph.*last\.detach"):
        copied(model)


def test_what_else_cannot_be_copied_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.lock = threading.Lock()
    with pytest.raises(CompatibilityError, match=r"cannot be copied.*lock"):
        copied(model)
