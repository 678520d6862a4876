"""The rules that keep numbers right: reductions, ignored labels, the causal shift, the class axis."""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.errors import ScalarError
from gradreg.scalars import (
    across_heads,
    all_logits,
    bind,
    check_scalar,
    is_causal_language_model,
    log_probability,
    logit,
    loss,
    margin,
    probability,
    read_outputs,
    token_loss,
    top_logit,
    true_logit,
)
from gradreg.testing._models import FakeForCausalLM, FakeForTokenClassification

Z = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -3.0]]).double()
Y = torch.tensor([2, 0])
BATCH = Batch(torch.zeros(2, 1), Y)


@dataclass
class Output:
    logits: Tensor | None = None
    score: Tensor | None = None


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (logit(1), [3.0, -1.0]),
        (logit(-1), [2.0, -3.0]),
        (top_logit(), [3.0, 0.0]),
        (top_logit(centered=True), [1.0, 4 / 3]),
        (true_logit(), [2.0, 0.0]),
        (margin(), [1.0, 1.0]),
        (probability(0), torch.softmax(Z, -1)[:, 0].tolist()),
        (log_probability(0), torch.log_softmax(Z, -1)[:, 0].tolist()),
        (loss(F.cross_entropy), F.cross_entropy(Z, Y, reduction="none").tolist()),
    ],
    ids=["logit", "last", "top", "centered", "true", "margin", "probability", "log_probability", "loss"],
)
def test_values(of: Any, expected: list[float]) -> None:
    assert of(Z, BATCH).tolist() == pytest.approx(expected)


def test_ties_have_one_winner() -> None:
    z = torch.tensor([[2.0, 2.0, 1.0]], requires_grad=True)
    for of in (top_logit(), margin()):
        (slope,) = torch.autograd.grad(of(z, Batch(torch.zeros(1, 1))).sum(), z)
        assert slope.abs().max() == 1
        assert (slope == 1).sum() == 1


def test_centered_ignores_a_constant_for_all_logits() -> None:
    of = top_logit(centered=True)
    assert torch.allclose(of(Z, BATCH), of(Z + 5, BATCH))


@pytest.mark.parametrize("of", [top_logit(centered=True), margin(), probability(0), log_probability(0)], ids=repr)
def test_one_logit_is_refused_with_the_way_out(of: Any) -> None:
    with pytest.raises(ScalarError, match=r"logit\(0\)"):
        of(torch.zeros(2, 1), BATCH)


@pytest.mark.parametrize("of", [logit(0), top_logit(), margin(), probability(0), true_logit()], ids=repr)
def test_no_class_axis_is_refused_with_the_way_out(of: Any) -> None:
    with pytest.raises(ScalarError, match=r"all_logits\(\)"):
        of(torch.zeros(2), BATCH)


@pytest.mark.parametrize("of", [logit(3), logit(-4), probability(5)], ids=repr)
def test_a_class_that_does_not_exist(of: Any) -> None:
    with pytest.raises(ScalarError, match="3 classes"):
        of(Z, BATCH)


def test_the_class_axis_may_be_another_one() -> None:
    images = torch.randn(2, 3, 5, 5)  # classes second, as torch's losses have it
    assert torch.equal(logit(2, axis=1)(images, BATCH), images[:, 2])
    assert torch.equal(top_logit(axis=1)(images, BATCH), images.amax(1))
    tokens = torch.randn(2, 4, 3)
    assert logit(0)(tokens, BATCH).shape == (2, 4)


# What is read


def test_logits_are_read_from_objects_and_mappings() -> None:
    for outputs in (Z, Output(Z), {"loss": None, "logits": Z}):
        assert read_outputs(outputs) is Z
    assert read_outputs(Output(score=Z), "score") is Z
    assert read_outputs({"score": Z}, "score") is Z
    assert read_outputs((None, Z), 1) is Z
    assert torch.equal(logit(1, output="score")({"score": Z}, BATCH), Z[:, 1])


@pytest.mark.parametrize(
    ("outputs", "output", "message"),
    [
        ({"score": Z}, None, "'score'"),
        ((Z, Z), None, "output="),
        (Output(), None, "Output"),
        ({"score": Z}, "scores", "'score'"),
        (Output(Z), "score", "NoneType"),
        (Output(Z), "nothing", "nothing"),
        ((Z,), 1, "returned 1"),
        (None, None, "NoneType"),
    ],
)
def test_outputs_that_cannot_be_read(outputs: Any, output: Any, message: str) -> None:
    with pytest.raises(ScalarError, match=message):
        read_outputs(outputs, output)


# Reductions


@pytest.mark.parametrize(
    "function",
    [
        F.cross_entropy,
        functools.partial(F.cross_entropy, label_smoothing=0.0),
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
    ],
    ids=["function", "partial", "module", "summing module", "lambda"],
)
def test_losses_are_unreduced(function: Any) -> None:
    expected = F.cross_entropy(Z, Y, reduction="none")
    assert torch.allclose(loss(function)(Z, BATCH), expected)


def test_the_user_s_loss_module_keeps_its_reduction() -> None:
    module = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double())
    values = loss(module)(Z, BATCH)
    assert module.reduction == "mean"
    assert torch.allclose(values, F.cross_entropy(Z, Y, weight=module.weight, reduction="none"))


def test_a_fixed_reduction_is_refused() -> None:
    with pytest.raises(ScalarError, match="reduction='mean'"):
        loss(functools.partial(F.cross_entropy, reduction="mean"))
    with pytest.raises(ScalarError, match="must not reduce"):
        loss(lambda outputs, targets: F.cross_entropy(outputs, targets))(Z, BATCH)
    with pytest.raises(ScalarError, match="function or module"):
        loss("cross_entropy")


def test_an_example_s_own_axes_are_summed_or_averaged() -> None:
    outputs, targets = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    batch = Batch(torch.zeros(2, 1), targets)
    squares = (outputs - targets) ** 2
    assert torch.allclose(loss(F.mse_loss)(outputs, batch), squares.sum((1, 2)))
    assert torch.allclose(loss(nn.MSELoss())(outputs, batch), squares.sum((1, 2)))
    assert torch.allclose(loss(F.mse_loss, mean=True)(outputs, batch), squares.mean((1, 2)))


def test_nothing_depends_on_the_size_of_the_batch() -> None:
    of = loss(nn.CrossEntropyLoss())
    assert torch.allclose(of(Z[:1], BATCH[:1]), of(Z, BATCH)[:1])


def test_missing_targets() -> None:
    for of in (loss(F.cross_entropy), true_logit(), token_loss(F.cross_entropy)):
        with pytest.raises(ScalarError, match="targets"):
            of(Z, Batch(torch.zeros(2, 1)))


# Tokens, ignored labels, the causal shift

TOKENS = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).double()
LABELS = torch.tensor([[1, 4, 0, -100], [-100, -100, -100, -100]])
TOKEN_BATCH = Batch(torch.zeros(2, 1), LABELS)
PER_TOKEN = F.cross_entropy(TOKENS.transpose(1, 2), LABELS, reduction="none")


@pytest.mark.parametrize("outputs", [TOKENS, {"logits": TOKENS}, Output(TOKENS)], ids=["tensor", "mapping", "object"])
def test_tokens_are_summed_and_ignored_labels_count_as_nothing(outputs: Any) -> None:
    values = loss(F.cross_entropy)(outputs, TOKEN_BATCH)
    assert torch.allclose(values, PER_TOKEN.sum(1))
    assert values[1] == 0


def test_the_mean_is_over_valid_tokens_and_never_nan() -> None:
    values = loss(F.cross_entropy, mean=True)(TOKENS, TOKEN_BATCH)
    assert values.tolist() == pytest.approx([float(PER_TOKEN[0].sum() / 3), 0.0])


def test_the_mean_respects_the_module_s_own_ignored_label() -> None:
    labels = torch.tensor([[1, 4, 0, 0], [2, 0, 0, 0]])
    of = loss(nn.CrossEntropyLoss(ignore_index=0), mean=True)
    expected = F.cross_entropy(TOKENS.transpose(1, 2), labels, ignore_index=0, reduction="none").sum(1)
    expected = expected / torch.tensor([2, 1])
    assert torch.allclose(of(TOKENS, Batch(torch.zeros(2, 1), labels)), expected)


def test_the_mean_respects_an_ignored_label_given_by_partial() -> None:
    labels = torch.tensor([[1, 4, 0, 0], [2, 0, 0, 0]])
    of = loss(functools.partial(F.cross_entropy, ignore_index=0), mean=True)
    expected = F.cross_entropy(TOKENS.transpose(1, 2), labels, ignore_index=0, reduction="none").sum(1)
    assert torch.allclose(of(TOKENS, Batch(torch.zeros(2, 1), labels)), expected / torch.tensor([2, 1]))


def test_token_loss_keeps_tokens() -> None:
    values = token_loss(F.cross_entropy)(TOKENS, TOKEN_BATCH)
    assert torch.allclose(values, PER_TOKEN)
    assert (values[LABELS == -100] == 0).all()
    with pytest.raises(ScalarError, match="token"):
        token_loss(F.cross_entropy)(Z, BATCH)


def test_square_tokens_and_classes_must_be_named_for_tensors_and_are_last_for_objects() -> None:
    square = torch.randn(2, 4, 4).double()
    labels = torch.tensor([[0, 1, 2, 3], [3, 3, 0, 1]])
    batch = Batch(torch.zeros(2, 1), labels)
    as_torch = F.cross_entropy(square, labels, reduction="none").sum(1)
    class_last = F.cross_entropy(square.transpose(1, 2), labels, reduction="none").sum(1)
    with pytest.raises(ScalarError, match=r"axis=1.*axis=-1"):
        loss(F.cross_entropy)(square, batch)
    assert torch.allclose(loss(F.cross_entropy, axis=1)(square, batch), as_torch)
    assert torch.allclose(loss(F.cross_entropy, axis=-1)(square, batch), class_last)
    assert torch.allclose(loss(F.cross_entropy)(Output(square), batch), class_last)


def test_true_logit_of_tokens_and_of_ignored_labels() -> None:
    values = true_logit()(TOKENS, TOKEN_BATCH)
    assert values.tolist()[0] == pytest.approx([float(TOKENS[0, t, c]) for t, c in enumerate([1, 4, 0])] + [0.0])
    assert (values[1] == 0).all()
    with pytest.raises(ScalarError, match="integer targets"):
        true_logit()(TOKENS, Batch(torch.zeros(2, 1), Y))


class MyModelForCausalLM(nn.Module):
    pass


class GPTLMHeadModel(nn.Module):
    pass


class EncoderDecoderForCausalLM(nn.Module):
    class config:  # noqa: N801  # an attribute of models, not a class of ours
        is_encoder_decoder = True


class MyForSequenceClassification(nn.Module):
    pass


def test_causal_language_models_are_known_by_name() -> None:
    assert is_causal_language_model(FakeForCausalLM())
    assert is_causal_language_model(MyModelForCausalLM())
    assert is_causal_language_model(GPTLMHeadModel())
    for model in (
        EncoderDecoderForCausalLM(),
        MyForSequenceClassification(),
        FakeForTokenClassification(),
        nn.Linear(1, 1),
    ):
        assert not is_causal_language_model(model)
    named = MyForSequenceClassification()
    named.loss_type = "ForCausalLM"
    assert is_causal_language_model(named)


def test_causal_language_models_are_shifted() -> None:
    shifted = F.cross_entropy(TOKENS[:, :-1].transpose(1, 2), LABELS[:, 1:], reduction="none")
    of = loss(F.cross_entropy)
    assert torch.allclose(bind(of, FakeForCausalLM())(TOKENS, TOKEN_BATCH), shifted.sum(1))
    assert torch.allclose(bind(of, FakeForTokenClassification())(TOKENS, TOKEN_BATCH), PER_TOKEN.sum(1))
    assert torch.allclose(loss(F.cross_entropy, shift=True)(TOKENS, TOKEN_BATCH), shifted.sum(1))
    never = bind(loss(F.cross_entropy, shift=False), FakeForCausalLM())
    assert torch.allclose(never(TOKENS, TOKEN_BATCH), PER_TOKEN.sum(1))
    mean = bind(loss(F.cross_entropy, mean=True), FakeForCausalLM())(TOKENS, TOKEN_BATCH)
    assert mean.tolist() == pytest.approx([float(shifted[0].sum() / 2), 0.0])
    tokens = bind(token_loss(F.cross_entropy), FakeForCausalLM())(TOKENS, TOKEN_BATCH)
    assert torch.allclose(tokens, shifted)
    with pytest.raises(ScalarError, match="shift"):
        loss(F.cross_entropy, shift="always")


def test_across_heads_binds_what_it_wraps() -> None:
    of = bind(across_heads(loss(F.cross_entropy)), FakeForCausalLM())
    assert of.function.shift is True


# Checks on what a scalar returns


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor(1.0), r"\(\)"),
        (torch.zeros(3), r"\(3,\)"),
        (torch.zeros(2, dtype=torch.long), "int64"),
        (torch.zeros(2, dtype=torch.bool), "bool"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (1.0, "float"),
        (None, "NoneType"),
    ],
)
def test_check_scalar_refuses(values: Any, message: str) -> None:
    with pytest.raises(ScalarError, match=message):
        check_scalar(values, 2, "mine")


def test_check_scalar_passes_targets_on() -> None:
    values = torch.zeros(2, 5)
    assert check_scalar(values, 2, "mine") is values


# Scalars are values: equal ones are computed once in a session


@pytest.mark.parametrize(
    "make",
    [
        lambda: logit(1),
        lambda: top_logit(centered=True),
        lambda: true_logit(),
        lambda: margin(),
        lambda: probability(2),
        lambda: log_probability(2),
        lambda: all_logits(),
        lambda: loss(F.cross_entropy),
        lambda: token_loss(F.cross_entropy, shift=True),
        lambda: across_heads(logit(0)),
    ],
)
def test_equal_scalars_are_equal(make: Any) -> None:
    assert make() == make()
    assert hash(make()) == hash(make())
    assert copy.deepcopy(make()) == make()
    assert pickle.loads(pickle.dumps(make())) == make()


def test_different_scalars_differ() -> None:
    scalars = [
        logit(0),
        logit(1),
        logit(0, axis=1),
        logit(0, output="x"),
        top_logit(),
        top_logit(centered=True),
        probability(0),
        log_probability(0),
        loss(F.cross_entropy),
        loss(F.cross_entropy, mean=True),
        loss(F.nll_loss),
        token_loss(F.cross_entropy),
        across_heads(logit(0)),
        true_logit(),
        margin(),
    ]
    assert len(set(scalars)) == len(scalars)
    module = nn.CrossEntropyLoss()
    assert loss(module) == loss(module)
    assert loss(module) != loss(nn.CrossEntropyLoss())


def test_binding_asks_the_model_every_time() -> None:
    of, model = loss(F.cross_entropy), nn.Linear(2, 2)
    assert bind(of, model) is bind(of, model)
    assert bind(of, model).shift is False
    model.loss_type = "ForCausalLM"
    assert bind(of, model).shift is True
    assert of == loss(F.cross_entropy)
