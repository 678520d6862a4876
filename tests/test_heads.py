"""gradreg.heads: scores, rules, combinations, and the oracle that says it is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import BatchError, GradregError, HeadsError


class Scripted(nn.Module):
    """A head that answers with the logits that its inputs hold for it."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.k]


def scripted(right: list[list[bool]], classes: int = 2) -> tuple[gr.Ensemble, gr.Batch]:
    """Heads that are right where the table [K][n] says so, and otherwise answer with the next class."""
    heads, n = len(right), len(right[0])
    targets = torch.arange(n) % classes
    answers = torch.stack([torch.where(torch.tensor(row), targets, (targets + 1) % classes) for row in right], 1)
    logits = 4 * F.one_hot(answers, classes).double()
    return gr.Ensemble([Scripted(k) for k in range(heads)]), gr.Batch(logits, targets)


TABLE = [[True, False, False, False], [True, True, True, False], [True, True, False, False], [False, True, True, True]]


def test_scores_are_accuracies() -> None:
    model, batch = scripted(TABLE)
    expected = torch.tensor([0.25, 0.75, 0.5, 0.75], dtype=torch.float64)
    for chunk_size in (1, 3, 100):
        assert torch.equal(gr.heads.scores(model, batch, chunk_size=chunk_size), expected)


def test_a_score_of_ones_own() -> None:
    model, batch = scripted(TABLE)
    found = gr.heads.scores(model, batch, lambda outputs, targets: -F.cross_entropy(outputs, targets, reduction="none"))
    expected = [-F.cross_entropy(batch.inputs[:, k], batch.targets) for k in range(4)]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize(
    ("rule", "options", "weights"),
    [
        ("best", {}, [0, 1, 0, 0]),  # the first of two equal ones
        ("top", {"k": 1}, [0, 1, 0, 0]),
        ("top", {"k": 2}, [0, 0.5, 0, 0.5]),
        ("top", {"k": 3}, [0, 1 / 3, 1 / 3, 1 / 3]),
        ("mean", {}, [0.25] * 4),
    ],
)
def test_rules(rule, options, weights) -> None:
    model, batch = scripted(TABLE)
    chosen = gr.heads.select(model, batch, rule, **options)
    torch.testing.assert_close(chosen.weights, torch.tensor(weights, dtype=torch.float64))
    assert chosen.head == 1
    assert not chosen.oracle
    assert chosen.heads == tuple(k for k in range(4) if weights[k])  # equal weights keep the order of the heads


def test_weights_by_score() -> None:
    model, batch = scripted(TABLE)
    chosen = gr.heads.select(model, batch, "weighted", temperature=0.5)
    expected = torch.tensor([0.5, 1.5, 1.0, 1.5], dtype=torch.float64).exp()
    torch.testing.assert_close(chosen.weights, expected / expected.sum())
    cold = gr.heads.select(model, batch, "weighted", temperature=1e-3)
    torch.testing.assert_close(cold.weights, torch.tensor([0, 0.5, 0, 0.5], dtype=torch.float64))


def test_probabilities_are_averaged_not_logits() -> None:
    model, batch = scripted(TABLE)
    chosen = gr.heads.select(model, batch, "top", k=2)
    outputs = torch.randn(5, 4, 3)
    expected = (outputs[:, 1].softmax(1) + outputs[:, 3].softmax(1)) / 2
    torch.testing.assert_close(chosen.probabilities(outputs), expected)
    assert torch.equal(chosen.predict(model, batch), chosen.probabilities(model(batch.inputs)).argmax(1))


def test_one_logit_is_binary() -> None:
    model = gr.Ensemble([Scripted(0), Scripted(1)])
    logits = torch.tensor([[[2.0], [-1.0]], [[3.0], [1.0]], [[-4.0], [1.0]]])
    batch = gr.Batch(logits, torch.tensor([1, 1, 0]))
    assert gr.heads.scores(model, batch).tolist() == pytest.approx([1.0, 1 / 3])
    chosen = gr.heads.select(model, batch)
    torch.testing.assert_close(chosen.probabilities(logits)[:, 1], logits[:, 0, 0].sigmoid())
    assert chosen.predict(model, batch).tolist() == [1, 1, 0]


def test_the_oracle_says_that_it_is_one() -> None:
    model, batch = scripted(TABLE)
    oracle, plain = gr.heads.select_oracle(model, batch), gr.heads.select(model, batch)
    assert oracle.oracle
    assert "oracle" in str(oracle)
    assert "oracle" not in str(plain)
    assert torch.equal(oracle.weights, plain.weights)


def test_selection_on_two_distributions_differs() -> None:
    """The best head in distribution is wrong elsewhere; only the oracle sees that."""
    model, inside = scripted([[True] * 4, [True, True, True, False]])
    _, outside = scripted([[False] * 4, [True] * 4])
    chosen, oracle = gr.heads.select(model, inside), gr.heads.select_oracle(model, outside)
    assert (chosen.head, oracle.head) == (0, 1)
    assert (chosen.predict(model, outside) == outside.targets).double().mean() == 0
    assert (oracle.predict(model, outside) == outside.targets).double().mean() == 1


def test_modes_and_parameters_are_left_as_they_were() -> None:
    heads = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout()) for _ in range(2)]
    model = gr.SharedBase(nn.Linear(4, 3), heads)
    model.heads[0].eval()
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batch = gr.Batch(torch.randn(6, 4), torch.arange(6) % 3)
    first = gr.heads.scores(model, batch)
    assert torch.equal(first, gr.heads.scores(model, batch))  # no dropout
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mappings_of_inputs() -> None:
    class Named(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.stack([a, b], 1)

    model = gr.Ensemble([Named(), Named()])
    batch = {"a": torch.zeros(4), "b": torch.ones(4), "labels": torch.tensor([1, 1, 0, 1])}
    assert gr.heads.scores(model, batch).tolist() == [0.75, 0.75]


def test_bad_input() -> None:
    model, batch = scripted(TABLE)
    with pytest.raises(GradregError, match="'weighted'"):
        gr.heads.select(model, batch, "oracle")
    for options in ({"rule": "top"}, {"rule": "top", "k": 0}, {"rule": "best", "k": 2}, {"rule": "top", "k": True}):
        with pytest.raises(GradregError, match="number of heads k"):
            gr.heads.select(model, batch, **options)
    with pytest.raises(HeadsError, match="k=9, but the model has 4 heads"):
        gr.heads.select(model, batch, "top", k=9)
    with pytest.raises(GradregError, match="temperature"):
        gr.heads.select(model, batch, "weighted", temperature=0.0)
    with pytest.raises(BatchError, match="no"):
        gr.heads.select(model, batch.inputs)
    with pytest.raises(BatchError, match="integer labels"):
        gr.heads.select(model, (batch.inputs, torch.randn(4)))
    with pytest.raises(HeadsError, match="SharedBase or an Ensemble"):
        gr.heads.select(nn.Linear(3, 2), (torch.zeros(4, 3), batch.targets))
    with pytest.raises(GradregError, match="one number per example"):
        gr.heads.scores(model, batch, lambda outputs, targets: outputs.sum())
    with pytest.raises(GradregError, match="NaN"):
        gr.heads.scores(model, batch, lambda outputs, targets: outputs[:, 0] * float("nan"))
    with pytest.raises(GradregError, match="chunk_size"):
        gr.heads.scores(model, batch, chunk_size=0)
    with pytest.raises(HeadsError, match="4 heads"):
        gr.heads.select(model, batch).probabilities(torch.zeros(2, 3, 2))
