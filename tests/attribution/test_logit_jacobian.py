"""Everything that follows from one logit Jacobian equals direct gradients, and costs one forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from tests.attribution.attribution_models import bert, tokens

WRT = (gr.Embeddings(), gr.Activations("bert.encoder.layer.*"), gr.AttentionMaps())
LABELS = torch.tensor([[0, 2, 1, 1], [2, -100, 0, -100]])


def same(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for key, value in found.items():
        assert torch.allclose(value, right[key], atol=1e-12), key


def entropy(outputs: Any, batch: gr.Batch) -> Tensor:
    log_p = F.log_softmax(outputs.logits, -1)
    return -(log_p.exp() * log_p).sum(-1)


def smoothed(outputs: Any, batch: gr.Batch) -> Tensor:
    return F.cross_entropy(outputs.logits.transpose(1, 2), batch.targets, reduction="none", label_smoothing=0.1)


def between(outputs: Any, batch: gr.Batch) -> Tensor:
    return outputs.logits[..., 2] - outputs.logits[..., 0]


def loss(outputs: Any, batch: gr.Batch) -> Tensor:
    return F.cross_entropy(outputs.logits.transpose(1, 2), batch.targets, reduction="none")


DERIVED = [
    ("logit", gr.logit(1), lambda j: j.logit(1)),
    ("probability", gr.probability(2), lambda j: j.probability(2)),
    ("log_probability", gr.log_probability(-1), lambda j: j.log_probability(-1)),
    ("margin", gr.margin(), lambda j: j.margin()),
    ("difference", between, lambda j: j.margin(2, 0)),
    ("entropy", entropy, lambda j: j.entropy()),
    ("loss", loss, lambda j: j.loss(LABELS)),
    ("smoothed_loss", smoothed, lambda j: j.loss(LABELS, label_smoothing=0.1)),
]


@pytest.fixture(scope="module")
def classifier() -> nn.Module:
    return bert()


@pytest.mark.parametrize(("of", "derived"), [row[1:] for row in DERIVED], ids=[row[0] for row in DERIVED])
def test_derived_gradients_of_a_token_classifier(classifier: nn.Module, of: Any, derived: Any) -> None:
    batch = tokens([4, 3])
    jacobian = gr.logit_jacobian(classifier, batch, WRT)
    assert jacobian.logits.shape == (2, 4, 3)
    assert len(jacobian.by_key) == 5
    same(derived(jacobian), gr.gradients(classifier, gr.Batch(batch, LABELS), of, WRT))


def test_probability_gradients_sum_to_zero_over_classes(classifier: nn.Module) -> None:
    jacobian = gr.logit_jacobian(classifier, tokens([4, 3]), gr.AttentionMaps())
    for name, value in jacobian.probability().items():
        assert value.sum(2).abs().max() < 1e-15 * max(1, jacobian.by_key[name].abs().max())
        assert torch.allclose(value[:, :, 1], jacobian.probability(1)[name], atol=1e-14)


def test_soft_targets() -> None:
    net, x = nn.Linear(3, 4).double(), torch.randn(5, 3, dtype=torch.float64)
    y = torch.rand(5, 4, dtype=torch.float64)
    jacobian = gr.logit_jacobian(net, x, gr.Inputs())
    right = gr.gradients(net, (x, y), lambda z, b: F.cross_entropy(z, b.targets, reduction="none"), gr.Inputs())
    same(jacobian.loss(y), right)


@pytest.mark.parametrize("classes", [3, 9])
def test_one_forward_whatever_the_number_of_classes(classes: int) -> None:
    model, batch = bert(classes, kind="BertForSequenceClassification"), tokens([4, 3])
    gr.logit_jacobian(model, batch, WRT)  # the model is looked at once
    calls: list[int] = []
    handle = model.register_forward_hook(lambda module, args, output: calls.append(1))
    try:
        jacobian = gr.logit_jacobian(model, batch, WRT)
        for derive in (jacobian.probability, jacobian.log_probability, jacobian.margin, jacobian.entropy):
            derive()
        jacobian.loss(torch.tensor([0, 2]))
    finally:
        handle.remove()
    assert len(calls) == 1


def test_chosen_tokens_and_chunks(classifier: nn.Module) -> None:
    batch = tokens([4, 3])
    whole = gr.logit_jacobian(classifier, batch, WRT)
    some = gr.logit_jacobian(classifier, batch, WRT, tokens=[2, 0])
    assert torch.allclose(some.logits, whole.logits[:, [2, 0]], atol=1e-14)
    same(dict(some.by_key), {key: value[:, [2, 0]] for key, value in whole.by_key.items()})
    same(dict(gr.logit_jacobian(classifier, batch, WRT, chunk_size=1).by_key), dict(whole.by_key))


def test_heads() -> None:
    model = gr.SharedBase(nn.Linear(3, 4), [nn.Linear(4, 2) for _ in range(3)]).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    jacobian = gr.logit_jacobian(model, x, gr.Features())
    assert jacobian.logits.shape == (5, 3, 2)
    same(jacobian.probability(0), gr.gradients(model, x, gr.probability(0), gr.Features()))


def test_derived_gradients_can_be_trained_on() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    one = gr.logit_jacobian(net, x, gr.Inputs(), differentiable=True).probability(1)["inputs"]
    two = gr.gradients(net, x, gr.probability(1), gr.Inputs(), differentiable=True)["inputs"]
    parameters = list(net.parameters())
    found, right = (torch.autograd.grad(g.square().sum(), parameters, allow_unused=True) for g in (one, two))
    for a, b in zip(found, right, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda j: j.logit(4), "no class 4"),
        (lambda j: j.probability(-5), "no class -5"),
        (lambda j: j.loss(torch.zeros(3, dtype=torch.long)), "do not fit"),
        (lambda j: j.loss(torch.full((5,), 9)), "outside"),
        (lambda j: j.loss(torch.zeros(5, 3)), "do not fit"),
        (lambda j: j.combined(torch.zeros(5, 3)), "do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Any, text: str) -> None:
    jacobian = gr.logit_jacobian(nn.Linear(3, 4), torch.zeros(5, 3), gr.Inputs())
    with pytest.raises(gr.GradregError, match=text):
        wrong(jacobian)


def test_wrong_tokens_and_outputs_are_refused(classifier: nn.Module) -> None:
    with pytest.raises(gr.GradregError, match="no token 7"):
        gr.logit_jacobian(classifier, tokens([4]), gr.Embeddings(), tokens=[7])
    with pytest.raises(gr.GradregError, match="no axis of tokens"):
        gr.logit_jacobian(nn.Linear(3, 4), torch.zeros(5, 3), gr.Inputs(), tokens=[0])
    with pytest.raises(gr.GradregError, match="axis of classes"):
        gr.logit_jacobian(nn.Flatten(0), torch.zeros(5, 1), gr.Inputs())


def test_it_is_shown_by_its_shapes_and_classes_are_numbers(classifier: nn.Module) -> None:
    jacobian = gr.logit_jacobian(classifier, tokens([4, 3]), gr.Embeddings())
    (key,) = jacobian.by_key
    assert (
        repr(jacobian)
        == f"LogitJacobian of logits {list(jacobian.logits.shape)}: {key!r} {list(jacobian.by_key[key].shape)}"
    )
    assert jacobian.logit()[key] is jacobian.by_key[key]
    same(jacobian.logit(torch.tensor(1)), jacobian.logit(1))  # type: ignore[arg-type]  # as an index of torch
    with pytest.raises(gr.GradregError, match="class 'good' is no number; allowed are integers from 0 to"):
        jacobian.probability("good")
    for wrong in ("good", torch.tensor([0, 1])):
        with pytest.raises(gr.errors.ScalarError, match=r"a class is one number.*use true_logit\(\)"):
            gr.gradients(classifier, tokens([4, 3]), gr.logit(wrong), gr.Embeddings())
