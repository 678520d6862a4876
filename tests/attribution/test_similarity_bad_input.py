"""Every error of `explain_similarity` says what was found, where, and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradreg as gr
from tests.attribution.similar_models import CAUSAL, EOS, SEQ2SEQ, bert_masked, gpt2, ids, made, row, t5

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model():
    return made(gpt2)


def changed(example, **values):
    return {**example, **values}


@pytest.mark.parametrize(
    ("b", "options", "error", "message"),
    [
        (row(ids(3, 4, 5), ids(-100, -100, -100)), {}, gr.errors.BatchError, "batch_b has no target that counts: all labels"),
        (row(ids(3), ids(3)), {}, gr.errors.BatchError, "batch_b has no target that counts"),
        (
            {name: torch.cat([value, value]) for name, value in CAUSAL[0].items()},
            {},
            gr.errors.BatchError,
            r"batch_b holds 2 examples; one is allowed. Give one row of every tensor",
        ),
        (row(ids(3, 50, 4), ids(3, 5, 4)), {}, gr.errors.BatchError, "holds the token 50, but GPT2LMHeadModel knows 50 tokens"),
        (row(ids(3, 5, 4), ids(3, 70, 4)), {}, gr.errors.ScalarError, "batch_b: a label lies outside"),
        ("text", {}, gr.errors.BatchError, "Cannot read a batch from a str"),
        (CAUSAL[1], {"params": "nothing.*"}, gr.errors.UnknownNameError, "No parameter matches 'nothing"),
        (CAUSAL[1], {"params": ()}, gr.GradregError, r"params=\(\); allowed are a glob"),
        (CAUSAL[1], {"params": 3}, gr.GradregError, "params=3; allowed are a glob"),
        (CAUSAL[1], {"groups": {"a": 3}}, gr.GradregError, r"groups\['a'\] is 3; allowed are a glob"),
        (CAUSAL[1], {"of": "loss"}, gr.GradregError, "of='loss' is not callable"),
        (CAUSAL[1], {"tokenizer": "gpt2"}, gr.GradregError, "tokenizer='gpt2' is a str; allowed are"),
        (CAUSAL[1], {"tokenizer": lambda ids: None}, gr.GradregError, "tokenizer gave a NoneType"),
        (CAUSAL[1], {"groups": 3}, gr.GradregError, "groups is a int; allowed are"),
        (CAUSAL[1], {"prompt": -1}, gr.GradregError, "prompt=-1; allowed are a number of tokens"),
        (CAUSAL[1], {"prompt": (1, 2, 3)}, gr.GradregError, "allowed are a number of tokens, and a pair"),
        (CAUSAL[1], {"memory": "much"}, gr.GradregError, "memory='much'; allowed are numbers of bytes"),
        (CAUSAL[1], {"calibration": []}, gr.errors.BatchError, "calibration is an empty list"),
        (
            CAUSAL[1],
            {"calibration": [row(ids(3, 4), ids(-100, -100))]},
            gr.errors.BatchError,
            r"calibration\[0\] has no target that counts",
        ),
        (
            CAUSAL[1],
            {"of": lambda outputs, batch: outputs.logits.sum()},
            gr.errors.ScalarError,
            "do not reduce",
        ),
    ],
)  # fmt: skip
def test_errors(model, b, options, error, message):
    with pytest.raises(error, match=message):
        gr.explain_similarity(model, CAUSAL[0], b, **options)


def test_labels_are_asked_for():
    example = {"input_ids": ids(3, 4, 5)}
    for build in (t5, bert_masked):
        with pytest.raises(gr.GradregError, match=r"labels|decoder_input_ids"):
            gr.explain_similarity(made(build), example, example)
    with pytest.raises(
        gr.errors.ScalarError, match=r"needs labels \[1, \.\.\.\], found none: put them into the batch as 'labels'"
    ):
        gr.explain_similarity(made(bert_masked), example, example)
    with pytest.raises(gr.errors.ScalarError, match=r"logits \(1, 3, 50\) for labels \(1,\)"):
        gr.explain_similarity(made(bert_masked), {**example, "labels": torch.tensor([1])}, example)


def test_a_model_without_a_head():
    from transformers import BertConfig, BertModel

    model = BertModel(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=20)
    )
    with pytest.raises(gr.errors.ScalarError, match=r"BertModel has no output head with logits.*Give of="):
        gr.explain_similarity(model.eval(), {"input_ids": ids(3, 4)}, {"input_ids": ids(3, 5)})


def test_nothing_to_train():
    model = made(gpt2).requires_grad_(False)
    with pytest.raises(gr.GradregError, match=r"is trainable \(requires_grad=False, as in quantized models"):
        gr.explain_similarity(model, *CAUSAL)
    with pytest.raises(gr.errors.CompatibilityError, match="ReLU has no parameters"):
        gr.explain_similarity(nn.ReLU(), torch.zeros(1, 2), torch.zeros(1, 2))


def test_numbers_that_are_none():
    model = made(gpt2)
    with torch.no_grad():
        model.transformer.wte.weight[8] = float("nan")
    with pytest.raises(gr.errors.NonFiniteLossError, match="batch_a: the scalar of target"):
        gr.explain_similarity(model, *CAUSAL)

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return (x * self.weight).pow(2).sum(1, keepdim=True).sqrt()

    with pytest.raises(
        gr.errors.NonFiniteLossError, match="A gradient is NaN or infinite although all losses are finite"
    ):
        gr.explain_similarity(Root(), torch.ones(1, 2), torch.ones(1, 2), of=lambda outputs, batch: outputs[:, 0])


def test_a_gradient_of_zero():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.fill_(-1)
    pair = (torch.ones(1, 2), torch.tensor([0])), (torch.ones(1, 2), torch.tensor([1]))
    with pytest.raises(gr.GradregError, match="The gradient of batch_a is zero, so it has no direction"):
        gr.explain_similarity(net, *pair, params="0.*")


def test_several_heads():
    model = gr.SharedBase(nn.Linear(3, 4), [nn.Linear(4, 2) for _ in range(3)])
    pair = (torch.ones(1, 3), torch.tensor([0]))
    with pytest.raises(gr.errors.CompatibilityError, match="SharedBase with 3 heads; explain one of its models"):
        gr.explain_similarity(model, pair, pair)


def test_what_is_not_a_model():
    with pytest.raises(gr.errors.CompatibilityError, match=r"needs a torch\.nn\.Module"):
        gr.explain_similarity(lambda x: x, *SEQ2SEQ)


def test_a_tokens_text_does_not_matter(model):
    assert gr.explain_similarity(model, *CAUSAL).tokens_b[-1].end
    assert gr.explain_similarity(model, *CAUSAL).tokens_b[-1].id == EOS
