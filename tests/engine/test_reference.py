"""The naive truth is itself checked against closed forms and finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradreg.batch import Batch
from gradreg.errors import CoupledExamplesError, GradregError, UnknownNameError
from gradreg.model import SharedBase
from gradreg.scalars import across_heads, all_logits, logit, loss
from gradreg.testing import reference, zoo
from gradreg.testing.compare import assert_same
from gradreg.wrt import Activations, Features, Inputs, Outputs, Params

# token_ids: torch leaves the gradient of the padding row out by design, finite differences do not
SMOOTH = [
    case
    for case in zoo.CASES
    if not case.tags & {"random", "large", "float32", "bfloat16"} and case.name != "token_ids"
]


def linear() -> tuple[nn.Linear, Batch]:
    return nn.Linear(3, 2).double(), Batch(torch.randn(4, 3).double(), torch.tensor([0, 1, 1, 0]))


def test_linear_model_by_hand() -> None:
    net, batch = linear()
    found = reference.gradients(net, batch, all_logits(), (Inputs(), Outputs(), Params("*")))
    unit = torch.eye(2).double()
    assert_same(
        found,
        {
            "inputs": net.weight.detach().expand(4, 2, 3),
            "outputs": unit.expand(4, 2, 2),
            "weight": torch.einsum("tc,nd->ntcd", unit, batch.inputs),
            "bias": unit.expand(4, 2, 2),
        },
    )


def test_cross_entropy_by_hand() -> None:
    net, batch = linear()
    residual = torch.softmax(net(batch.inputs).detach(), -1) - F.one_hot(batch.targets, 2)
    truth = {"weight": torch.einsum("nc,nd->ncd", residual, batch.inputs), "bias": residual}
    of = loss(F.cross_entropy)
    assert_same(reference.gradients(net, batch, of, Params()), truth)
    mean = {key: value.mean(0) for key, value in truth.items()}
    assert_same(reference.gradients(net, batch, of, Params(), per="batch", mean=True), mean)


def test_groups_are_sorted_sums_of_examples() -> None:
    net, batch = linear()
    batch = Batch(batch.inputs, batch.targets, groups=torch.tensor([7, 2, 7, 7]))
    of = loss(F.cross_entropy)
    each = reference.gradients(net, batch, of, Params("bias"))["bias"]
    total = reference.gradients(net, batch, of, Params("bias"), per="group")["bias"]
    assert torch.allclose(total, torch.stack([each[1], each[0] + each[2] + each[3]]))
    mean = reference.gradients(net, batch, of, Params("bias"), per="group", mean=True)["bias"]
    assert torch.allclose(mean, torch.stack([each[1], (each[0] + each[2] + each[3]) / 3]))


def test_heads_by_hand() -> None:
    model = SharedBase(nn.Linear(3, 4), [nn.Linear(4, 2) for _ in range(3)]).double()
    batch = Batch(torch.randn(2, 3).double())
    rows = torch.stack([head.weight[1] for head in model.heads]).detach()
    wrt = (Features(), Inputs(), Params("heads.**.weight"), Activations("heads.2"))
    found = reference.gradients(model, batch, logit(1), wrt)
    features = model.features(batch.inputs).detach()
    truth = {
        "features": rows.expand(2, 3, 4),
        "inputs": (rows @ model.base.weight.detach()).expand(2, 3, 3),
        "heads.2": torch.tensor([[0, 0], [0, 0], [0, 1]]).double().expand(2, 3, 2),
    }
    truth |= {f"heads.{k}.weight": torch.stack([torch.zeros(2, 4).double(), features], 1) for k in range(3)}
    assert_same(found, truth)
    mixed = reference.gradients(model, batch, across_heads(lambda outputs, _: outputs[..., 1].sum(1)), Features())
    assert_same(mixed, {"features": rows.sum(0).expand(2, 4)})


@pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case.name)
def test_second_derivative_agrees_with_finite_differences(case: zoo.Case) -> None:
    model, batch = case.make_model(), case.make_batch()
    wrt = next(iter(case.wrts.values()))
    second = reference.second_derivative(model, batch, case.of, wrt)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    directions = {name: torch.randn_like(parameter) for name, parameter in named.items()}
    assert second.keys() == named.keys()

    def value_at(step: float) -> float:
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.add_(directions[name], alpha=step)
        number = reference.random_functional(reference.gradients(model, batch, case.of, wrt))
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.sub_(directions[name], alpha=step)
        return float(number)

    step = 1e-6
    slope = (value_at(step) - value_at(-step)) / (2 * step)
    predicted = sum(float((second[name] * directions[name]).sum()) for name in named)
    assert predicted == pytest.approx(slope, rel=1e-6, abs=1e-7)


def test_directional_is_the_slope_along_the_direction() -> None:
    case = zoo.case("mlp")
    model, batch = case.make_model(), case.make_batch()
    inputs, weights = torch.randn(2, 3, 3).double(), torch.randn(2, 2, 4).double()
    wrt = (Inputs(), Params("2.weight"))
    found = reference.directional(model, batch, all_logits(), wrt, {"inputs": inputs, "2.weight": weights})
    assert found.shape == (3, 2, 2)
    step = 1e-6
    for d in range(2):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                model[2].weight.add_(weights[d], alpha=sign * step)
                ends.append(model(batch.inputs + sign * step * inputs[d]))
                model[2].weight.sub_(weights[d], alpha=sign * step)
        assert torch.allclose(found[..., d], (ends[0] - ends[1]) / (2 * step), atol=1e-8)


def test_refuses_coupled_examples() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(CoupledExamplesError, match="inputs"):
        reference.gradients(net, torch.randn(4, 3).double(), logit(0), Inputs())


def test_names_what_does_not_exist() -> None:
    net, batch = linear()
    with pytest.raises(UnknownNameError):
        reference.gradients(net, batch, logit(0), Activations("nothing"))
    with pytest.raises(GradregError, match="at has the keys"):
        reference.gradients(net, batch, logit(0), Inputs(), at={"weight": torch.zeros(1)})


ORTHOGONAL, DIAGONAL = [0.0, 5.0], [1.0, 1.0]


@pytest.mark.parametrize(
    ("similarity", "third", "expected"),
    [
        ("dot", ORTHOGONAL, 3.0),
        ("dot_squared", DIAGONAL, 9.0 + 1.0 + 9.0),
        ("cosine", DIAGONAL, 1.0 + 2 * 0.5**0.5),
        ("cosine_squared", DIAGONAL, 1.0 + 0.5 + 0.5),
        ("abs_cosine", ORTHOGONAL, 1.0),
    ],
)
def test_pairwise_alignment_by_hand(similarity: Any, third: list[float], expected: float) -> None:
    heads = torch.tensor([[[1.0, 0.0], [3.0, 0.0], third]]).double()
    assert reference.pairwise_alignment(heads, similarity).tolist() == pytest.approx([expected])


def test_pairwise_alignment_counts_pairs_and_heads() -> None:
    heads = torch.tensor([[[1.0], [-1.0], [2.0]], [[1.0], [1.0], [0.0]]])
    assert reference.pairwise_alignment(heads, "abs_cosine").tolist() == pytest.approx([3.0, 1.0])
    assert reference.pairwise_alignment(heads, "abs_cosine", mean=True).tolist() == pytest.approx([1.0, 1 / 3])
    with pytest.raises(GradregError, match="one head"):
        reference.pairwise_alignment(heads[:, :1])
    with pytest.raises(GradregError, match="allowed are dot"):
        reference.pairwise_alignment(heads, "angle")


def test_comparison_can_fail() -> None:
    case = zoo.case("five_heads")
    truth = reference.gradients(case.make_model(), case.make_batch(), case.of, case.wrts["features"])
    for change in (lambda g: g + 1e-8, lambda g: g[:1], lambda g: g.float(), lambda g: g * float("nan")):
        with pytest.raises(AssertionError, match="features"):
            assert_same({"features": change(truth["features"])}, truth)
    with pytest.raises(AssertionError, match="missing"):
        assert_same({}, truth)
