"""Objective: one shared forward, weights and schedules, state, logs, and what it refuses."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import (
    CompatibilityError,
    DetachedGradientError,
    GradregError,
    HeadsError,
    NonFiniteLossError,
    ScalarError,
    UnboundedPenaltyWarning,
)
from tests.cases import small_batch, smooth_heads


@contextmanager
def counted(module: nn.Module) -> Iterator[SimpleNamespace]:
    calls = SimpleNamespace(forward=0)
    handle = module.register_forward_hook(lambda *_: setattr(calls, "forward", calls.forward + 1))
    yield calls
    handle.remove()


class InterpolatedPenalty(gr.Regularizer):
    """Gradient norm at points between two batches (as WGAN-GP has it): a point of its own."""

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        middle = batch.inputs + batch.extras["alpha"] * (batch.extras["fake"] - batch.inputs)
        g = gr.gradients(model, batch, gr.logit(0), gr.Inputs(), at={"inputs": middle}, differentiable=True)["inputs"]
        return ((g.square().flatten(1).sum(1) + 1e-12).sqrt() - 1).square().mean()


class SecondPointPenalty(gr.Regularizer):
    """Difference of gradients at a second point that depends on the first gradient (as CURE has it)."""

    of, wrt = gr.loss(F.cross_entropy), gr.Inputs()

    def shares(self) -> list[tuple[object, object]]:
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        first = gr.gradients(model, batch, self.of, self.wrt, differentiable=True)["inputs"]
        second = batch.inputs + 0.1 * first.detach().sign()
        moved = gr.gradients(model, batch, self.of, self.wrt, at={"inputs": second}, differentiable=True)["inputs"]
        return (moved - first).square().sum(1).mean()


class AverageNormPenalty(gr.Regularizer):
    """Gradient norm against its own moving average (as the path length of StyleGAN2 has it): state."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__(weight)
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))
        self.seen: Tensor | None = None

    def shares(self) -> list[tuple[object, object]]:
        return [(gr.logit(0), gr.Inputs())]

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        g = gr.gradients(model, batch, gr.logit(0), gr.Inputs(), differentiable=True)["inputs"]
        norm = (g.square().sum(1) + 1e-12).sqrt()
        self.seen = norm.detach().mean()
        return (norm - self.average).square().mean()

    def update(self, model: nn.Module, batch: gr.Batch) -> None:
        assert self.seen is not None
        self.average.lerp_(self.seen, 0.5)


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def by_hand(model: nn.Module, x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(of(model(x)).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("count", [1, 2, 5, 64])
@pytest.mark.parametrize("with_penalty", [True, False])
def test_one_base_forward_per_step(count: int, with_penalty: bool) -> None:
    model, batch = smooth_heads(count), small_batch()
    several = {
        "diversity": gr.regularizers.DiverseHeads(),
        "published": gr.regularizers.DiverseHeads.published(),
        "inputs": gr.regularizers.DiverseHeads(wrt=(gr.Inputs(), gr.Activations("base.0")), of=gr.margin()),
    }
    objective = gr.Objective(F.cross_entropy, **(several if with_penalty and count > 1 else {}))
    objective(model, batch)  # the first call may look twice (axes of activations)
    with counted(model.base) as calls:
        objective(model, batch)[0].backward()
    assert calls.forward == 1
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("count", [2, 5])
def test_loss_equals_task_plus_weighted_penalty_by_hand(count: int) -> None:
    model, batch = smooth_heads(count), small_batch()
    objective = gr.Objective(F.cross_entropy, diversity=gr.regularizers.DiverseHeads(weight=3.0))
    loss, logs = objective(model, batch)
    outputs = model(batch.inputs)
    task = torch.stack([F.cross_entropy(outputs[:, k], batch.targets) for k in range(count)]).mean()
    penalty = gr.regularizers.DiverseHeads()(model, batch)
    torch.testing.assert_close(loss, task + 3 * penalty)
    assert set(logs) == {"loss", "task", "diversity", "diversity/weight"}
    assert not logs["loss"].requires_grad
    expected = torch.autograd.grad(task + 3 * penalty, list(model.parameters()))
    found = torch.autograd.grad(loss, list(model.parameters()))
    for name, a, b in zip(dict(model.named_parameters()), found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=name)


def test_penalty_at_interpolated_inputs() -> None:
    model, batch = plain_model(), small_batch()
    batch = gr.Batch(
        batch.inputs, batch.targets, extras={"fake": torch.randn_like(batch.inputs), "alpha": torch.rand(4, 1).double()}
    )
    _, logs = gr.Objective(F.cross_entropy, gp=InterpolatedPenalty())(model, batch)
    middle = batch.inputs + batch.extras["alpha"] * (batch.extras["fake"] - batch.inputs)
    g = by_hand(model, middle, lambda z: z[:, 0])
    expected = ((g.square().sum(1) + 1e-12).sqrt() - 1).square().mean()
    torch.testing.assert_close(logs["gp"], expected.detach())


def test_second_point_depends_on_the_first_gradient() -> None:
    model, batch = plain_model(), small_batch()
    objective = gr.Objective(F.cross_entropy, cure=SecondPointPenalty())
    objective(model, batch)  # the first call also looks whether examples are mixed
    with counted(model) as calls:
        loss, logs = objective(model, batch)
    assert calls.forward == 2  # the shared forward serves the task and the first point
    of = lambda z: F.cross_entropy(z, batch.targets, reduction="none")
    first = by_hand(model, batch.inputs, of)
    moved = by_hand(model, batch.inputs + 0.1 * first.detach().sign(), of)
    expected = (moved - first).square().sum(1).mean()
    torch.testing.assert_close(logs["cure"], expected.detach())
    total = F.cross_entropy(model(batch.inputs), batch.targets) + expected
    for a, b in zip(
        torch.autograd.grad(loss, list(model.parameters())),
        torch.autograd.grad(total, list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_state_moves_in_update_only_and_is_saved() -> None:
    model, batch = plain_model(), small_batch()
    objective = gr.Objective(F.cross_entropy, path=AverageNormPenalty())
    penalty = objective.regularizers["path"]
    penalty(model, batch)
    assert penalty.average == 0  # usable alone, without moving
    objective.eval()
    objective(model, batch)
    assert penalty.average == 0
    assert objective.step == 0
    objective.train()
    objective(model, batch)
    moved = penalty.average.clone()
    assert moved > 0
    assert objective.step == 1
    again = gr.Objective(F.cross_entropy, path=AverageNormPenalty())
    again.load_state_dict(objective.state_dict())
    assert again.step == 1
    assert again.regularizers["path"].average == moved


def test_schedules_decide_the_weight_and_skip_the_work() -> None:
    model, batch = smooth_heads(2), small_batch()
    penalty = gr.regularizers.DiverseHeads(weight=gr.schedules.Every(2, gr.schedules.WarmUp(1.0, steps=4)))
    objective = gr.Objective(F.cross_entropy, diversity=penalty)
    logs = [objective(model, batch)[1] for _ in range(6)]
    assert [log["diversity/weight"] for log in logs] == [0, 0, 1, 0, 2, 0]  # 0 at step 0, doubled at every second step
    assert ["diversity" in log for log in logs] == [False, False, True, False, True, False]


def test_the_task_keeps_its_own_reduction() -> None:
    model, batch = smooth_heads(5), small_batch()
    for reduction in ("mean", "sum"):
        loss, _ = gr.Objective(nn.CrossEntropyLoss(reduction=reduction))(model, batch)
        outputs = model(batch.inputs)
        each = [F.cross_entropy(outputs[:, k], batch.targets, reduction=reduction) for k in range(5)]
        torch.testing.assert_close(loss, torch.stack(each).mean())
    with pytest.raises(ScalarError, match="scalar"):
        gr.Objective(nn.CrossEntropyLoss(reduction="none"))(model, batch)


def test_validation_under_no_grad_and_inference_mode() -> None:
    model, batch = smooth_heads(3), small_batch()
    objective = gr.Objective(F.cross_entropy, diversity=gr.regularizers.DiverseHeads()).eval()
    expected, _ = objective(model, batch)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            own = gr.Batch(batch.inputs.clone(), batch.targets.clone())
            loss, logs = objective(model, own)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected.detach())
        assert logs["diversity"] > 0
    objective(model, batch)[0].backward()


def test_training_moves_buffers_and_random_numbers_once() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3)).double()
    twin, batch = copy.deepcopy(model), small_batch()
    heads = gr.SharedBase(
        model, [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double() for _ in range(2)]
    )
    objective = gr.Objective(F.cross_entropy, diversity=gr.regularizers.DiverseHeads())
    torch.manual_seed(2)
    objective(heads, batch)
    after = torch.rand(1)
    torch.manual_seed(2)
    twin(batch.inputs)
    assert torch.equal(after, torch.rand(1))
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_hf_like_outputs_and_shift() -> None:
    class TinyForCausalLM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)

        def forward(self, input_ids: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.out(self.embedding(input_ids)))

    model = TinyForCausalLM()
    ids = torch.randint(0, 7, (2, 5))
    labels = ids.clone()
    labels[0, 3:] = -100
    loss, _ = gr.Objective(F.cross_entropy)(model, {"input_ids": ids, "labels": labels})
    logits = model(ids).logits
    torch.testing.assert_close(
        loss, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    )


# Bad input


def test_not_finite_names_step_and_part() -> None:
    model, batch = smooth_heads(3), small_batch()
    objective = gr.Objective(F.cross_entropy, diversity=gr.regularizers.DiverseHeads())
    objective(model, batch)
    broken = gr.Batch(batch.inputs.clone(), batch.targets)
    broken.inputs[1, 2] = float("nan")
    with pytest.raises(NonFiniteLossError, match=r"step 1.*'task' is nan.*'diversity' is nan"):
        objective(model, broken)
    assert objective.step == 1


def test_labels_out_of_range() -> None:
    model, batch = smooth_heads(3), small_batch()
    wrong = gr.Batch(batch.inputs, torch.tensor([0, 1, 3, 0]))
    with pytest.raises(ScalarError, match=r"Label 3 of example 2.*3 classes"):
        gr.Objective(F.cross_entropy)(model, wrong)
    with pytest.raises(ScalarError, match="Label -1"):
        gr.Objective(nn.CrossEntropyLoss())(model, gr.Batch(batch.inputs, torch.tensor([0, 1, -1, 0])))


def test_heads_that_do_not_fit() -> None:
    with pytest.raises(HeadsError, match="at least one head"):
        gr.SharedBase(nn.Linear(4, 3), [])
    base = nn.Linear(4, 3).double()
    one = gr.SharedBase(base, [nn.Linear(3, 3).double()])
    with pytest.raises(HeadsError, match="nothing to compare"):
        gr.Objective(F.cross_entropy, diversity=gr.regularizers.DiverseHeads())(one, small_batch())
    unequal = gr.SharedBase(base, [nn.Linear(3, classes).double() for classes in (2, 3)])
    with pytest.raises(HeadsError, match=r"Head 1 gives outputs of shape \(4, 3\), head 0 of \(4, 2\)"):
        gr.Objective(F.cross_entropy)(unequal, small_batch())


def test_nothing_to_train() -> None:
    model = smooth_heads(2).requires_grad_(False)
    with pytest.raises(CompatibilityError, match="requires grad"):
        gr.Objective(F.cross_entropy)(model, small_batch())
    with pytest.raises(CompatibilityError, match="requires grad"):
        gr.regularizers.DiverseHeads()(model, small_batch()).detach().requires_grad_()


def test_detached_penalties_are_refused() -> None:
    class Detached(gr.Regularizer):
        def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
            return gr.gradients(model, batch, gr.logit(0), gr.Inputs())["inputs"].square().sum()

    with pytest.raises(DetachedGradientError, match="differentiable=True"):
        gr.Objective(F.cross_entropy, detached=Detached())(plain_model(), small_batch())


def test_arguments_are_checked() -> None:
    with pytest.raises(GradregError, match=r"not a gradreg\.Regularizer"):
        gr.Objective(F.cross_entropy, penalty=lambda model, batch: 0)
    with pytest.raises(GradregError, match="finite number from 0"):
        gr.regularizers.DiverseHeads(weight=-1.0)
    with pytest.raises(GradregError, match="finite number from 0"):
        gr.regularizers.DiverseHeads(weight=float("nan"))
    penalty = gr.regularizers.DiverseHeads(weight=lambda step: -1.0)
    with pytest.raises(GradregError, match="step 0"):
        gr.Objective(F.cross_entropy, diversity=penalty)(smooth_heads(2), small_batch())
    with pytest.raises(ScalarError, match="targets"):
        gr.Objective(F.cross_entropy)(plain_model(), torch.zeros(2, 4).double())


def test_a_falling_dot_product_warns_once() -> None:
    model, batch = smooth_heads(2), small_batch()
    penalty = gr.regularizers.DiverseHeads.published()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(200):
            optimizer.zero_grad()
            penalty(model, batch).backward()
            optimizer.step()
            if caught:
                break
    assert [warning.category for warning in caught] == [UnboundedPenaltyWarning]
    assert "no lower bound" in str(caught[0].message)


def test_nothing_keeps_a_graph_alive() -> None:
    model, batch = smooth_heads(3), small_batch()
    objective = gr.Objective(F.cross_entropy, diversity=gr.regularizers.DiverseHeads())
    loss, _ = objective(model, batch)
    loss.backward()
    assert all(not p.grad.requires_grad for p in model.parameters() if p.grad is not None)
    assert gr.engine.current_session() is None
