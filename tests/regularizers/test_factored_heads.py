"""Few heads that begin with a linear layer: the penalty from factors is that of the gradients themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.penalties import SIMILARITIES, factored_alignment, factors_are_cheaper, pairwise_alignment


@pytest.fixture(autouse=True)
def _whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradreg.regularizers.diverse_heads.factors_are_cheaper", lambda *_: True)


class Halving(nn.Module):
    """Works in place without saying so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def head(*rest: nn.Module, width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, width), *(rest or (nn.Softplus(), nn.Linear(width, 3))))


def heads_of(kind: str) -> list[nn.Module]:
    shared = nn.Linear(5, 5)
    if kind == "two":
        return [head(), head()]
    if kind == "three":
        return [head(), head(), head()]
    if kind == "unequal":
        return [head(), head(nn.Tanh(), nn.Linear(6, 3), width=6)]
    if kind == "one layer twice":
        return [nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(5, 3)), head()]
    if kind == "in place":
        return [head(nn.SiLU(inplace=True), nn.Linear(4, 3)), head()]
    if kind == "in place, unsaid":
        return [head(Halving(), nn.Softplus(), nn.Linear(4, 3)), head()]
    if kind == "linear alone":
        return [nn.Linear(5, 3), head()]
    return [head(nn.Dropout(0.5), nn.Softplus(), nn.Linear(4, 3)), head()]


def in_step(model: nn.Module, reg: gr.Regularizer, batch: gr.Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The second step of an objective: the first one measures the floor of the signed dot product on whole gradients."""
    objective = gr.Objective(None, penalty=reg)
    for _ in range(2):
        torch.manual_seed(0)
        model.zero_grad()
        value, _ = objective(model, batch)
    value.backward()
    return value.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize(
    "kind", ["two", "three", "unequal", "one layer twice", "in place", "in place, unsaid", "linear alone"]
)
def test_the_step_is_that_of_whole_gradients(kind: str, similarity: str) -> None:
    model = gr.SharedBase(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), heads_of(kind)).double()
    batch = gr.Batch(torch.randn(7, 6, dtype=torch.float64), torch.randint(3, (7,)))
    reg = gr.regularizers.DiverseHeads(similarity=similarity)
    value, found = in_step(model, reg, batch)

    features = model.base(batch.inputs)
    rows = []
    for own in model.heads:
        own_features = features.clone()
        logits = own(own_features.clone())
        top = logits.max(1).values - logits.mean(1)
        rows.append(torch.autograd.grad(top.sum(), own_features, create_graph=True)[0])
    expected = pairwise_alignment(torch.stack(rows, 1), similarity)
    model.zero_grad()
    expected.backward()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-12)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)
        else:
            assert name not in found


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original: Callable[..., Tensor] = factored_alignment

    def counting(*args: object) -> Tensor:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr("gradreg.regularizers.diverse_heads.factored_alignment", counting)
    return calls


@pytest.mark.parametrize(
    ("kind", "taken"), [("two", True), ("one layer twice", False), ("in place", False), ("in place, unsaid", False)]
)
def test_the_short_way_is_taken_where_it_is_right(kind: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    model = gr.SharedBase(nn.Linear(6, 5), heads_of(kind)).double()
    in_step(model, gr.regularizers.DiverseHeads(), gr.Batch(torch.randn(4, 6, dtype=torch.float64)))
    assert bool(calls) is taken


def test_hooks_on_heads_still_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    model = gr.SharedBase(nn.Linear(6, 5), heads_of("two"))
    seen: list[int] = []
    model.heads[0].register_forward_hook(lambda *_: seen.append(1))
    in_step(model, gr.regularizers.DiverseHeads(), gr.Batch(torch.randn(4, 6)))
    assert seen
    assert not calls


def test_dropout_draws_what_it_draws_without_a_penalty() -> None:
    model = gr.SharedBase(nn.Linear(6, 5), heads_of("dropout")).double()
    batch = gr.Batch(torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,)))
    tasks = []
    for penalty in ({}, {"d": gr.regularizers.DiverseHeads()}):
        torch.manual_seed(3)
        tasks.append(gr.Objective(F.cross_entropy, **penalty)(model, batch)[1]["task"])
    torch.testing.assert_close(tasks[0], tasks[1])


def test_autocast_gives_the_penalty_of_float32_nearly() -> None:
    model = gr.SharedBase(nn.Linear(6, 5), heads_of("two"))
    batch = gr.Batch(torch.randn(8, 6), torch.randint(3, (8,)))
    plain = gr.Objective(None, d=gr.regularizers.DiverseHeads())(model, batch)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = gr.Objective(None, d=gr.regularizers.DiverseHeads())(model, batch)[0]
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, plain, rtol=0.1, atol=0.02)


def test_second_derivatives_of_the_penalty() -> None:
    deltas = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weights = [torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for similarity in SIMILARITIES:

        def penalty(*tensors: Tensor, similarity: str = similarity) -> Tensor:
            pairs = list(zip(tensors[:2], tensors[2:], strict=True))
            return factored_alignment(pairs, similarity, "mean", 1e-12)

        assert torch.autograd.gradcheck(penalty, (*deltas, *weights))
        assert torch.autograd.gradgradcheck(penalty, (*deltas, *weights))


@pytest.mark.parametrize(
    ("n", "widths", "features", "similarity", "cheaper"),
    [
        (256, [64, 64], 256, "dot", True),  # 2.1 against 8.4 million products
        (256, [64, 64], 256, "cosine", True),  # 6.3 against 8.4
        (16, [64, 64], 256, "cosine", False),  # 3.3 against 0.5
        (256, [256, 256], 64, "dot", False),  # 21 against 8.4
    ],
)
def test_what_is_cheaper_is_counted(n: int, widths: list[int], features: int, similarity: str, cheaper: bool) -> None:
    assert factors_are_cheaper(n, widths, features, similarity) is cheaper
