"""Sums over groups run every group alone where that gives the same numbers; sums over the batch use a session's forward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg import Batch, Objective, Params, Regularizer, gradients, loss, plan
from gradreg.engine import open_session
from gradreg.errors import CoupledExamplesError, GradregError
from gradreg.testing import reference

OF = loss(F.cross_entropy)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def grouped(n: int = 6) -> Batch:
    return Batch(torch.randn(n, 3).double(), torch.arange(n) % 2, groups=torch.tensor(([5, 2, 5, 9, 2, 5] * n)[:n]))


def assert_close(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)


def sizes_seen(model: nn.Module) -> list[int]:
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    return seen


def test_every_group_runs_alone() -> None:
    model, batch = network(), grouped()
    truth = reference.gradients(model, batch, OF, Params("*"), per="group", mean=True)
    gradients(model, batch, OF, Params("*"), per="group")  # the first call looks whether examples are apart
    seen = sizes_seen(model)
    found = gradients(model, batch, OF, Params("*"), per="group", mean=True)
    assert seen == [2, 3, 1]
    assert_close(found, truth)


class Mixing(nn.Module):
    """Subtracts the mean over the batch, which no norm layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0) * x[:, :1])


class FixedSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.scale = nn.Parameter(torch.ones(6, 1).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


@pytest.mark.parametrize("make", [Mixing, FixedSize])
def test_where_examples_are_not_apart_one_forward_serves_all(make: type[nn.Module]) -> None:
    model, batch = make(), grouped()
    found = gradients(model, batch, OF, Params("**"), per="group")
    outputs = model(batch.inputs)
    for position, label in enumerate((2, 5, 9)):
        chosen = batch.groups == label
        risk = F.cross_entropy(outputs[chosen], batch.targets[chosen], reduction="sum")
        truth = torch.autograd.grad(risk, list(model.parameters()), retain_graph=True)
        assert_close({name: value[position] for name, value in found.items()}, dict(zip(found, truth, strict=True)))


def test_mixing_that_only_random_integer_models_could_hide() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.last = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, ids: Tensor) -> Tensor:
            features = self.embed(ids).mean(1)
            return self.last(F.dropout(features, 0.5) - features.mean(0))

    model = Tokens().double()
    batch = Batch(torch.randint(5, (6, 2)), torch.arange(6) % 2, groups=torch.tensor([0, 1] * 3))
    seen = sizes_seen(model)
    gradients(model, batch, OF, Params("**"), per="group")
    assert seen[-1] == 6


def test_dropout_models_run_group_by_group_and_leave_the_random_stream() -> None:
    model, batch = nn.Sequential(network(), nn.Dropout(0.5)), grouped()
    before = torch.get_rng_state()
    gradients(model, batch, OF, Params("**"), per="group")
    assert torch.equal(before, torch.get_rng_state())
    seen = sizes_seen(model)
    gradients(model, batch, OF, Params("**"), per="group")
    assert seen == [2, 3, 1]


def test_the_plan_says_one_backward_for_all_groups() -> None:
    assert plan(network(), grouped(), OF, Params("*"), per="group").cost == pytest.approx(1.0)
    assert plan(Mixing(), grouped(), OF, Params("**"), per="group").cost == pytest.approx(1 / 3 + 3 * 2 / 3)


class BatchGradient(Regularizer):
    def __init__(self, announce: bool = True, mean: bool = True, glob: str = "*") -> None:
        super().__init__()
        self.announce, self.mean, self.glob = announce, mean, glob

    def shares(self):
        return [(OF, Params(self.glob))] if self.announce else []

    def forward(self, model, batch) -> Tensor:
        found = gradients(model, batch, OF, Params(self.glob), per="batch", mean=self.mean, differentiable=True)
        return sum(value.square().sum() for value in found.values())


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("glob", ["*", "2.*"])
def test_a_session_serves_sums_over_the_batch(mean: bool, glob: str) -> None:
    model, batch = network(), grouped()
    losses = []
    for announce, forwards in ((True, 1), (False, 2)):
        penalty = BatchGradient(announce, mean, glob)
        objective = Objective(F.cross_entropy, penalty=penalty)
        objective(model, batch)
        seen = sizes_seen(model)
        total, _ = objective(model, batch)
        assert len(seen) == forwards
        losses.append(torch.autograd.grad(total, list(model.parameters())))
    torch.testing.assert_close(*losses, rtol=1e-11, atol=1e-13)


def test_what_a_session_does_not_serve() -> None:
    model, batch = network(), grouped()
    with open_session(model, batch, [(OF, Params("*"))]) as session:
        seen = sizes_seen(model)
        assert session.outputs.shape == (6, 2)
        gradients(model, batch, OF, Params("*"), per="batch", differentiable=True)
        gradients(model, batch, OF, Params("*"), per="batch")
        assert seen == [6]
        other = {"0.weight": torch.zeros(4, 3).double()}
        gradients(model, batch, OF, Params("0.weight"), per="batch", at=other, differentiable=True)
        gradients(model, Batch(batch.inputs, batch.targets), OF, Params("*"), per="batch", differentiable=True)
        gradients(network(), batch, OF, Params("*"), per="batch", differentiable=True)
        assert seen == [6, 6, 6]
    found = gradients(model, batch, OF, Params("*"), per="batch")
    assert not any(value.requires_grad for value in found.values())


def test_points_and_parameters_are_announced_apart() -> None:
    from gradreg import Inputs

    with (
        pytest.raises(GradregError, match="two pairs"),
        open_session(network(), grouped(), [(OF, (Params("*"), Inputs()))]),
    ):
        pass


def test_batch_norm_in_train_mode_per_group_is_still_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    with pytest.raises(CoupledExamplesError):
        gradients(model, grouped(), OF, Params("0.*"), per="group")
