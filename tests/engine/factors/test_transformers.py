"""Layer factors on models of transformers, with padding and masks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import collect_factors

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}
CLASSES = gr.loss(F.cross_entropy)
TOKENS = gr.token_loss(F.cross_entropy)


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=3))


def masked_bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(vocab_size=30, dim=8, n_layers=2, n_heads=2, hidden_dim=12, num_labels=3)
    return transformers.DistilBertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=30, n_embd=8, n_layer=2, n_head=2, n_positions=16, pad_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1, pad_token_id=0))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=30, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, pad_token_id=0, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def batch(kind: str, n: int, seed: int) -> gr.Batch:
    """Token ids of different lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 30, (n, 7), generator=generator)
    mask = torch.ones_like(ids)
    for i in range(n):
        mask[i, 7 - i % 4 :] = 0
    ids = ids * mask
    if kind == "classes":
        return gr.Batch({"input_ids": ids, "attention_mask": mask}, torch.randint(0, 3, (n,), generator=generator))
    labels = ids.masked_fill(mask == 0, -100)
    return gr.Batch({"input_ids": ids, "attention_mask": mask}, labels)


def loop(model: nn.Module, of: Any, data: gr.Batch) -> dict[str, Tensor]:
    """One example at a time, by autograd alone."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    rows = []
    for i in range(len(data)):
        one = data[i : i + 1]
        inputs = dict(one.inputs)
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=one.targets)
        logits = model(**inputs).logits
        if of is CLASSES:
            scalar = F.cross_entropy(logits, one.targets)
        else:
            shifted = type(model).__name__.endswith(("LMHeadModel", "CausalLM"))
            logits, targets = (logits[:, :-1], one.targets[:, 1:]) if shifted else (logits, one.targets)
            scalar = F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum")
        rows.append(torch.autograd.grad(scalar, list(named.values()), allow_unused=True, materialize_grads=True))
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(named)}


MODELS = [
    (bert, "classes", CLASSES, 1e-10, ()),
    (masked_bert, "tokens", TOKENS, 1e-10, ()),
    (distilbert, "classes", CLASSES, 1e-10, ()),
    (gpt2, "tokens", TOKENS, 1e-10, ()),
    (llama, "tokens", TOKENS, 1e-5, ()),
    (
        t5,
        "tokens",
        TOKENS,
        1e-5,
        (),
    ),
]


@pytest.mark.parametrize(
    ("make", "kind", "of", "tolerance", "gradients"), MODELS, ids=[row[0].__name__ for row in MODELS]
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_products_are_those_of_the_loop(
    make: Callable[[], nn.Module], kind: str, of: Any, tolerance: float, gradients: tuple[str, ...], attention: str
) -> None:
    torch.manual_seed(0)
    model = make().eval().double()
    model.set_attn_implementation(attention)
    a, b = batch(kind, 5, 1), batch(kind, 3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gr.errors.SlowRouteWarning)
        one, other = (collect_factors(model, data, of, gr.Params("*")) for data in (a, b))
    first, second = loop(model, of, a), loop(model, of, b)
    expected = torch.stack([first[name].flatten(1) @ second[name].flatten(1).T for name in first]).sum(0)
    assert float((one.dot(other) - expected).abs().max() / expected.abs().max()) < tolerance
    norms = torch.stack([value.flatten(1).square().sum(1) for value in first.values()]).sum(0)
    assert float((one.squared_norms() - norms).abs().max() / norms.max()) < tolerance
    assert {row.name for row in one.coverage if row.rule == "gradients"} == set(gradients)
    assert all(row.rule is not None for row in one.coverage)
