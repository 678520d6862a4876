"""LocalIndependence, GradientAlignmentLoss and TRS against loops over pairs, on ensembles and shared bases alike."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import GradregError, HeadsError
from tests.regularizers import models

EVERY = pytest.mark.parametrize("make", models.HEADS.values(), ids=models.HEADS)
KINDS = {
    "lit": gr.regularizers.LocalIndependence,
    "gal": gr.regularizers.GradientAlignmentLoss,
    "trs": gr.regularizers.TRS,
}
KIND = pytest.mark.parametrize("kind", KINDS)


def members(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, gr.SharedBase):
        return [nn.Sequential(model.base, head) for head in model.heads]
    return list(model.models)


def loss_gradients(model: nn.Module, batch: gr.Batch, at_features: bool = False) -> list[Tensor]:
    """One backward per model, `[n, d]` each."""
    found = []
    for position, member in enumerate(members(model)):
        if at_features:
            point, member = model.base(batch.inputs), model.heads[position]
        else:
            point = batch.inputs.clone().requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            risk = F.cross_entropy(member(point), batch.targets, reduction="sum")
        found.append(torch.autograd.grad(risk, point, create_graph=True)[0])
    return found


def naive(kind: str, gradients: list[Tensor]) -> Tensor:
    pairs, n = list(itertools.combinations(gradients, 2)), len(gradients[0])
    total = 0.0
    for x in range(n):
        cosines = []
        for a, b in pairs:
            norms = ((a[x] * a[x]).sum() + 1e-12).sqrt() * ((b[x] * b[x]).sum() + 1e-12).sqrt()
            cosines.append((a[x] * b[x]).sum() / norms)
        if kind == "lit":
            total = total + sum(c * c for c in cosines)
        elif kind == "gal":
            total = total + sum(c.exp() for c in cosines).log()
        else:
            smooth = sum((a[x] * a[x]).sum() + (b[x] * b[x]).sum() for a, b in pairs)
            total = total + (sum(c.abs() for c in cosines) + 0.5 * smooth) / len(pairs)
    return total / n


def penalty_of(kind: str, **options) -> gr.Regularizer:
    return KINDS[kind](**options, **({"smoothness": 0.5} if kind == "trs" else {}))


@KIND
@EVERY
def test_equals_loops_over_pairs(kind, make) -> None:
    model, batch = make(), models.batch()
    models.check_equal(penalty_of(kind)(model, batch), naive(kind, loss_gradients(model, batch)), model)


@KIND
def test_at_shared_features(kind) -> None:
    model, batch = models.shared(), models.batch()
    expected = naive(kind, loss_gradients(model, batch, at_features=True))
    models.check_equal(penalty_of(kind, wrt=gr.Features())(model, batch), expected, model)


@KIND
@EVERY
def test_first_and_second_derivative(kind, make) -> None:
    models.check_derivatives(penalty_of(kind), make(), models.batch(4))


@KIND
def test_in_an_objective_the_forward_is_shared(kind) -> None:
    model, batch = models.shared(), models.batch()
    calls = []
    model.base.register_forward_hook(lambda *_: calls.append(1))
    penalty = penalty_of(kind, wrt=gr.Features())
    gr.Objective(F.cross_entropy, penalty=penalty)(model, batch)
    calls.clear()
    _, logs = gr.Objective(F.cross_entropy, penalty=penalty)(model, batch)
    assert len(calls) == 1
    expected = naive(kind, loss_gradients(model, batch, at_features=True)).detach()
    torch.testing.assert_close(logs["penalty"], expected, rtol=1e-10, atol=1e-12)


@KIND
def test_order_of_examples_and_of_models_and_duplicates_do_not_matter(kind) -> None:
    model, batch = models.ensemble(), models.batch()
    penalty = penalty_of(kind)
    value = penalty(model, batch)
    turned = gr.Ensemble([model.models[k] for k in (2, 0, 1)])
    for other, data in ((model, batch[torch.randperm(6)]), (model, batch[list(range(6)) * 2]), (turned, batch)):
        torch.testing.assert_close(penalty(other, data), value, rtol=1e-11, atol=1e-13)


def bent(direction: tuple[float, float]) -> nn.Module:
    """exp(v·x): its gradient at 0 is v."""
    first = nn.Linear(2, 1, bias=False)
    first.weight.data = torch.tensor([direction])
    return nn.Sequential(first, Exponential()).double()


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def test_closed_forms_at_known_gradients() -> None:
    """Gradients (3, 0), (1, 1), (0, 2): cosines 1/√2, 0 and 1/√2; squared norms 9, 2 and 4."""
    model = gr.Ensemble([bent((3.0, 0.0)), bent((1.0, 1.0)), bent((0.0, 2.0))])
    origin = torch.zeros(1, 2).double()
    options = {"of": gr.logit(0), "eps": 1e-30}
    lit = gr.regularizers.LocalIndependence(**options)(model, origin)
    torch.testing.assert_close(lit.detach(), torch.tensor(1.0).double(), rtol=1e-12, atol=0)
    gal = gr.regularizers.GradientAlignmentLoss(**options)(model, origin)
    expected = math.log(2 * math.exp(0.5**0.5) + 1)
    torch.testing.assert_close(gal.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    trs = gr.regularizers.TRS(smoothness=0.1, **options)(model, origin)
    expected = 2 * 0.5**0.5 / 3 + 0.1 * 2 * (9 + 2 + 4) / 3
    torch.testing.assert_close(trs.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    total = gr.regularizers.LocalIndependence(reduction="sum", **options)(model, origin.expand(4, 2))
    torch.testing.assert_close(total.detach(), torch.tensor(4.0).double(), rtol=1e-12, atol=0)


def test_a_metric_changes_what_counts() -> None:
    model = gr.Ensemble([bent((1.0, 5.0)), bent((1.0, -5.0))])
    first_axis = torch.tensor([[1.0], [0.0]]).double()
    penalty = gr.regularizers.LocalIndependence(of=gr.logit(0), metric=first_axis, eps=1e-30)
    with pytest.warns(
        gr.ZeroSecondDerivativeWarning
    ):  # on one axis all gradients are parallel, whatever the parameters
        value = penalty(model, torch.zeros(1, 2).double())
    torch.testing.assert_close(value.detach(), torch.tensor(1.0).double())


@KIND
def test_equal_models_and_vanishing_gradients_are_finite(kind) -> None:
    model, batch = models.ensemble(), models.batch()
    for member in model.models[1:]:
        member.load_state_dict(model.models[0].state_dict())
    for parameter in model.models[2].parameters():
        parameter.data.zero_()
    value = penalty_of(kind)(model, batch)
    first = torch.autograd.grad(value, models.parameters(model), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), models.parameters(model), allow_unused=True)
    assert all(torch.isfinite(g).all() for g in (*first, *(g for g in second if g is not None)))


def test_trs_searches_for_rough_points_in_the_ball() -> None:
    model, batch, radius = models.ensemble(), models.batch(), 0.3
    plain = gr.regularizers.TRS()(model, batch)
    found = gr.regularizers.TRS(radius=radius, steps=4)(model, batch)
    assert float(found.detach()) > float(plain.detach())
    # by hand: signed ascent on the summed squared norms, clipped to the ball
    moved = batch.inputs
    for _ in range(4):
        point = moved.detach().requires_grad_()
        total = sum(g.square().sum() for g in _gradients_at(model, point, batch.targets))
        step = torch.autograd.grad(total, point)[0].sign() * (2 * radius / 4)
        moved = (moved + step).clamp(batch.inputs - radius, batch.inputs + radius)
    own = loss_gradients(model, batch)
    similarity = naive("trs", own) - 0.5 * 2 * sum(g.square().sum() for g in own) / 3 / 6
    rough = _gradients_at(model, moved.detach().requires_grad_(), batch.targets)
    expected = similarity + 2 * sum(g.square().sum() for g in rough) / 3 / 6
    models.check_equal(found, expected, model)


def _gradients_at(model: nn.Module, point: Tensor, targets: Tensor) -> list[Tensor]:
    return [
        torch.autograd.grad(F.cross_entropy(member(point), targets, reduction="sum"), point, create_graph=True)[0]
        for member in members(model)
    ]


def test_trs_without_smoothness_is_the_mean_absolute_cosine() -> None:
    model, batch = models.ensemble(), models.batch()
    gradients = torch.stack(loss_gradients(model, batch), 1)
    expected = gr.penalties.pairwise_alignment(gradients, "abs_cosine")
    models.check_equal(gr.regularizers.TRS(smoothness=0.0)(model, batch), expected, model)


@KIND
def test_bad_input(kind) -> None:
    batch = models.batch()
    with pytest.raises(HeadsError, match="compares heads"):
        penalty_of(kind)(models.mlp(), batch)
    with pytest.raises(HeadsError, match="nothing to compare"):
        penalty_of(kind)(gr.Ensemble([models.mlp()]), batch)
    with pytest.raises(GradregError, match="needs targets"):
        penalty_of(kind)(models.ensemble(), batch.inputs)
    with pytest.raises(GradregError, match="weight"):
        penalty_of(kind, weight=-1.0)
    with pytest.raises(GradregError, match="eps"):
        penalty_of(kind, eps=-1.0)
    with pytest.raises(GradregError, match="entries"):
        penalty_of(kind, metric=torch.eye(5).double())(models.ensemble(), batch)


def test_bad_options() -> None:
    with pytest.raises(GradregError, match="median"):
        gr.regularizers.LocalIndependence(reduction="median")
    for options in ({"radius": 0.1}, {"steps": 2}, {"radius": -1.0, "steps": 2}, {"smoothness": float("nan")}):
        with pytest.raises(GradregError):
            gr.regularizers.TRS(**options)
    with pytest.raises(GradregError, match="ball"):
        gr.regularizers.TRS(wrt=gr.Features(), radius=0.1, steps=2)
    with pytest.raises(GradregError, match="median"):
        gr.penalties.coherence(torch.ones(2, 2, 2), reduction="median")
