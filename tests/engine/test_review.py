"""Faults that a review found, each as the smallest case."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import CompatibilityError, CoupledExamplesError, GradregError, HeadsError, InPlaceError, ScalarError
from gradreg.model import swapped
from gradreg.testing.compare import assert_same
from tests.cases import small_batch, smooth_heads


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function(x))


@pytest.mark.parametrize("wrt", [gr.Inputs(), gr.Params("*")], ids=["inputs", "params"])
@pytest.mark.parametrize(
    "function",
    [lambda x: x.cumsum(0), lambda x: x.flip(0).cumsum(0).flip(0), lambda x: torch.cat([x[:2], x[2:] + x[:-2]])],
    ids=["later on earlier", "earlier on later", "at a distance"],
)
def test_mixing_in_one_direction_is_refused(function: Callable[[Tensor], Tensor], wrt: Any) -> None:
    with pytest.raises(CoupledExamplesError):
        gr.gradients(Lambda(function).double(), torch.randn(5, 4).double(), gr.logit(0), wrt)


def test_chunks_leave_the_statistics_of_the_whole_batch() -> None:
    base = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
    model = gr.SharedBase(base, [nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2)]).double()
    x = torch.randn(6, 4).double()
    whole = gr.gradients(model, x, gr.logit(0), gr.Features())
    assert_same(gr.gradients(model, x, gr.logit(0), gr.Features(), chunk_size=2), whole)


def test_chunks_of_a_base_that_mixes_by_hand_are_refused() -> None:
    model = gr.SharedBase(Lambda(lambda x: x - x.mean(0)), [nn.Linear(3, 2)]).double()
    x = torch.randn(6, 4).double()
    gr.gradients(model, x, gr.logit(0), gr.Features())  # mixed before the features: fine
    with pytest.raises(CoupledExamplesError, match="split"):
        gr.gradients(model, x, gr.logit(0), gr.Features(), chunk_size=2)


class InputNorm(gr.Regularizer):
    def shares(self) -> Any:
        return [(gr.logit(0), gr.Inputs())]

    def gradient(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        return gr.gradients(model, batch, gr.logit(0), gr.Inputs(), differentiable=True)["inputs"]

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        return self.gradient(model, batch).square().sum()


class MovedParameters(InputNorm):
    """Looks at a model whose first weight is doubled for the time of the call."""

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        with swapped(model, {"0.weight": 2 * model[0].weight}):
            return super().forward(model, batch)


class EvalMode(InputNorm):
    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        model.eval()
        try:
            return super().forward(model, batch)
        finally:
            model.train()


@pytest.mark.parametrize("kind", [MovedParameters, EvalMode])
def test_a_session_serves_no_stale_forward(kind: type[InputNorm]) -> None:
    model, batch = nn.Sequential(*net(), nn.Dropout(0.5)), small_batch()
    if kind is MovedParameters:
        model[3].p = 0.0
    alone = kind()(model, batch).detach()
    _, logs = gr.Objective(None, plain=InputNorm(), moved=kind())(model, batch)
    torch.testing.assert_close(logs["moved"], alone)


class Careless(InputNorm):
    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        return self.gradient(model, batch).mul_(10).square().sum()


def test_gradients_changed_in_place_are_not_handed_to_the_next() -> None:
    with pytest.raises(InPlaceError, match="out-of-place"):
        gr.Objective(None, careless=Careless(), plain=InputNorm())(net(), small_batch())


class Scaled(nn.Module):
    def __init__(self, setting: Any) -> None:
        super().__init__()
        self.setting, self.linear = setting, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.setting["scale"] if isinstance(self.setting, dict) else self.setting
        return self.linear(x) * scale


def test_settings_that_can_change_keep_heads_apart() -> None:
    model = gr.SharedBase(nn.Linear(4, 3), [Scaled({"scale": 1.0}) for _ in range(5)]).double()
    x = torch.randn(2, 4).double()
    model(x)
    model.heads[1].setting["scale"] = 3.0
    torch.testing.assert_close(model(x)[:, 1], model.heads[1](model.base(x)))


def test_tensors_as_settings_get_their_own_gradient() -> None:
    scales = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(5)]
    model = gr.SharedBase(nn.Linear(4, 3), [Scaled(scale) for scale in scales]).double()
    model(torch.randn(2, 4).double()).sum().backward()
    assert all(scale.grad is not None for scale in scales)


def test_ties_that_two_walks_would_name_differently() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.Linear(3, 3)
            self.inner = nn.Sequential(layer, nn.Tanh(), layer)
            self.also = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.also(self.inner(x))

    model = gr.SharedBase(nn.Linear(4, 3), [Tied() for _ in range(5)]).double()
    x = torch.randn(2, 4).double()
    torch.testing.assert_close(model(x), torch.stack([head(model.base(x)) for head in model.heads], 1))


def test_diverse_heads_needs_heads() -> None:
    with pytest.raises(HeadsError, match="compares heads"):
        gr.regularizers.DiverseHeads(wrt=gr.Inputs())(net(), torch.randn(3, 4).double())
    mixing = gr.across_heads(lambda outputs, batch: outputs.sum((1, 2)))
    with pytest.raises(HeadsError, match="compares heads"):
        gr.regularizers.DiverseHeads(of=mixing)(smooth_heads(), small_batch())


def test_a_loss_of_the_users_own_is_taken_per_head() -> None:
    class Hardest(nn.CrossEntropyLoss):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs, targets, reduction="none").topk(2).values.mean()

    model, batch = smooth_heads(5), small_batch()
    loss, _ = gr.Objective(Hardest())(model, batch)
    outputs = model(batch.inputs)
    expected = torch.stack([Hardest()(outputs[:, k], batch.targets) for k in range(5)]).mean()
    torch.testing.assert_close(loss, expected)


def test_equal_directions_give_equal_sums_under_dropout() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)).double()
    direction = torch.randn(1, 3, 4).double().expand(3, 3, 4)
    sums = gr.directional(model, torch.randn(3, 4).double(), gr.logit(0), gr.Inputs(), direction)
    torch.testing.assert_close(sums, sums[:, :1].expand(3, 3))


def test_a_loss_module_is_read_at_the_call() -> None:
    criterion = nn.CrossEntropyLoss()
    of, outputs, batch = gr.loss(criterion), torch.randn(4, 3).double(), small_batch()
    criterion.label_smoothing = 0.5
    expected = F.cross_entropy(outputs, batch.targets, label_smoothing=0.5, reduction="none")
    torch.testing.assert_close(of(outputs, batch), expected)


def test_regression_targets_are_never_broadcast() -> None:
    batch = gr.Batch(torch.randn(4, 3), torch.randn(4))
    with pytest.raises(ScalarError, match="broadcast"):
        gr.loss(F.mse_loss)(torch.randn(4, 4), batch)
    with pytest.raises(ScalarError, match="broadcast"):
        gr.Objective(nn.MSELoss())(nn.Linear(3, 4), batch)


@pytest.mark.parametrize("similarity", gr.penalties.SIMILARITIES)
def test_autocast_around_an_objective(similarity: str) -> None:
    model, batch = smooth_heads(5).float(), small_batch().to(torch.float32)
    objective = gr.Objective(F.cross_entropy, diversity=gr.regularizers.DiverseHeads(similarity=similarity))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, logs = objective(model, batch)
    loss.backward()
    assert logs["diversity"].dtype == torch.float32
    torch.testing.assert_close(logs["diversity"], objective(model, batch)[1]["diversity"], rtol=0.1, atol=1e-2)


def test_a_frozen_critic_trains_a_generator() -> None:
    critic = net().requires_grad_(False)
    generator = nn.Linear(2, 4).double()
    objective = gr.Objective(None, smooth=InputNorm())
    objective(critic, gr.Batch(generator(torch.randn(5, 2).double())))[0].backward()
    assert generator.weight.grad.abs().sum() > 0


def test_scalars_that_close_over_a_model_do_not_keep_it_alive() -> None:
    def run() -> weakref.ref[nn.Module]:
        model = net()
        gr.gradients(
            model,
            torch.randn(3, 4).double(),
            lambda outputs, batch: outputs[:, 0] + 0 * model[0].weight.sum(),
            gr.Inputs(),
        )
        return weakref.ref(model)

    reference = run()
    gc.collect()
    assert reference() is None


def test_attributes_that_a_forward_writes_stay_as_they_were() -> None:
    class Remembers(nn.Linear):
        seen: int | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = len(x)
            return super().forward(x)

    model = Remembers(4, 3).double()
    for wrt in (gr.Inputs(), gr.Params("*")):
        gr.gradients(model, torch.randn(5, 4).double(), gr.logit(0), wrt)
        assert "seen" not in vars(model)
    gr.Objective(None, smooth=InputNorm())(model, torch.randn(5, 4).double())
    assert model.seen == 5  # the forward of the step, not that of a check


def test_errors_name_the_way_out() -> None:
    model, x = net(), torch.randn(6, 4).double()
    scale = torch.rand(6).double()
    with pytest.raises(ScalarError, match=r"batch\.extras"):
        gr.gradients(model, x, lambda outputs, batch: outputs[:, 0] * scale, gr.Params("*"))
    with pytest.raises(GradregError, match="at must be a mapping"):
        gr.gradients(model, x, gr.logit(0), gr.Inputs(), at=x)
    dropout = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    with pytest.raises(CompatibilityError, match="eval mode"):
        gr.gradients(dropout, x, gr.logit(0), gr.Params("*"), randomness="error")
    with pytest.raises(HeadsError, match="direction of the features"):
        gr.directional(smooth_heads(), x, gr.logit(0), gr.Features(), torch.randn(2, 6, 4).double())
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    with pytest.raises(CoupledExamplesError):
        gr.plan(norm, x, gr.logit(0), gr.Inputs())


def test_warnings_point_at_the_users_line() -> None:
    model = gr.SharedBase(nn.Linear(4, 3), [nn.Linear(3, 3) for _ in range(2)]).double()
    with pytest.warns(gr.ZeroSecondDerivativeWarning) as caught:
        gr.Objective(F.cross_entropy, diversity=gr.regularizers.DiverseHeads())(model, small_batch())
    assert caught[0].filename == __file__


def test_misuse_is_named() -> None:
    with pytest.raises(ScalarError, match=r"of\(outputs, batch\)"):
        gr.gradients(net(), torch.randn(2, 4).double(), lambda outputs: outputs.sum(-1), gr.Inputs())
    with pytest.raises(HeadsError, match=r"\[head\]"):
        gr.SharedBase(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(GradregError, match="need names"):
        gr.Objective(F.cross_entropy, gr.regularizers.DiverseHeads())
    with pytest.raises(gr.errors.UnknownNameError, match="weight' matches"):
        gr.gradients(net(), torch.randn(2, 4).double(), gr.logit(0), gr.Params("*.*.weight"))

    class Forgetful(gr.Regularizer):
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
            return torch.zeros(())

    with pytest.raises(GradregError, match=r"super\(\).__init__"):
        gr.Objective(F.cross_entropy, forgetful=Forgetful())
