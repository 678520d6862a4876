"""Tiny models of every family, pairs of examples, and token gradients by one plain autograd call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.attribution import SimilarityReport

PAD, EOS = 0, 1
SPECIAL = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 2}


def ids(*numbers: int) -> Tensor:
    return torch.tensor([numbers])


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 50}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = BartConfig(d_model=16, vocab_size=50, max_position_embeddings=32, **heads, **layers)
    config.pad_token_id, config.eos_token_id, config.bos_token_id, config.decoder_start_token_id = PAD, EOS, 2, EOS
    return BartForConditionalGeneration(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=50)
    config.eos_token_id, config.bos_token_id, config.pad_token_id = EOS, 2, PAD
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=1, **sizes, **SPECIAL))


def _bert(**further: Any) -> Any:
    from transformers import BertConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertConfig(vocab_size=50, pad_token_id=PAD, **sizes, **further)


def bert_masked() -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(_bert())


def bert_classifier() -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(_bert(num_labels=3))


def row(tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


ASK = (3, 4, 5)
SEQ2SEQ = (row(ids(*ASK, EOS), ids(7, EOS)), row(ids(*ASK, EOS), ids(7, 8, EOS)))
CAUSAL = (
    row(ids(*ASK, 7, EOS), ids(-100, -100, -100, 7, EOS)),
    row(ids(*ASK, 7, 8, EOS), ids(-100, -100, -100, 7, 8, EOS)),
)
MASKED = (row(ids(3, 4, 5, 7), ids(-100, 4, -100, 7)), row(ids(3, 4, 5, 7, 9, 8), ids(-100, -100, 6, 9, -100, 2)))
CLASSES = (row(ids(3, 4, 5, 7), torch.tensor([1])), row(ids(3, 4, 5, 7, 9, 8), torch.tensor([2])))

# builder, pair, whether labels lie one position later, tolerance: T5 and Llama take norms in float32 whatever the model
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, Any], bool, float]] = {
    "t5": (t5, SEQ2SEQ, False, 1e-5),
    "bart": (bart, SEQ2SEQ, False, 1e-10),
    "gpt2": (gpt2, CAUSAL, True, 1e-10),
    "llama": (llama, CAUSAL, True, 1e-5),
    "bert_masked": (bert_masked, MASKED, False, 1e-10),
    "bert_classifier": (bert_classifier, CLASSES, False, 1e-10),
}


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """A model in float64 and eval mode, away from its initial symmetry."""
    torch.manual_seed(0)
    model = build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def token_losses(model: nn.Module, example: dict[str, Tensor], shift: bool) -> list[Tensor]:
    inputs = {name: value for name, value in example.items() if name != "labels"}
    labels = example["labels"]
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
    logits = model(**inputs).logits
    if labels.dim() == 1:
        return [F.cross_entropy(logits, labels)]
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return [F.cross_entropy(logits[0, t], labels[0, t]) for t in range(labels.shape[1]) if labels[0, t] != -100]


def token_gradients(model: nn.Module, example: dict[str, Tensor], shift: bool) -> list[dict[str, Tensor]]:
    """One autograd call per token, nothing shared."""
    named = dict(model.named_parameters())
    rows = []
    for loss in token_losses(model, example, shift):
        found = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        rows.append(
            {
                name: (torch.zeros_like(own) if gradient is None else gradient).flatten()
                for (name, own), gradient in zip(named.items(), found, strict=True)
            }
        )
    return rows


def matrix(rows: list[dict[str, Tensor]], names: Any = None) -> Tensor:
    """Token gradients as rows, of some parameters."""
    return torch.stack([torch.cat([one[name] for name in (names or one)]) for one in rows])


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()))


def names_of(report: SimilarityReport, group: str) -> tuple[str, ...]:
    (row_,) = [one for one in report.groups if one.name == group]
    return row_.parameters
