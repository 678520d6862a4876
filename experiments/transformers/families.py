"""Tiny models, with random weights, of the families of transformers that gradreg is tried on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.batch import Batch

__all__ = ["FAMILIES", "Family"]

_VOCABULARY, _LABELS = 40, 3
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
    "num_labels": _LABELS,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "head_dim": 8}
_BART = {
    "vocab_size": _VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 24,
    "num_labels": _LABELS,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "num_labels": _LABELS,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """A model class with a tiny configuration.

    Args:
        name: As people call it.
        config: The configuration class of transformers.
        model: The model class of transformers.
        settings: Arguments of the configuration.
        maps: How many attention maps a forward has.
        kind: What it is given: `"encoder"`, `"causal"`, `"seq2seq"` or `"image"`.
        exact: Whether it computes in float64 when its parameters are; others go through float32 inside.
    """

    name: str
    config: str
    model: str
    settings: Mapping[str, Any]
    maps: int = 2
    kind: str = "encoder"
    exact: bool = True
    dtype: torch.dtype = field(default=torch.float64)

    def make(self, attention: str | None = None, scale: float = 2.0) -> nn.Module:
        """Return the model in eval mode, with the same weights at every call.

        Args:
            attention: `attn_implementation`; None for the default.
            scale: Factor on all matrices: initial weights are so small that a lost mask would hardly show.
        """
        import transformers

        settings = dict(self.settings)
        if attention is not None:
            settings["attn_implementation"] = attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = getattr(transformers, self.model)(getattr(transformers, self.config)(**settings))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(scale)
        return model.to(self.dtype).eval()

    def batch(self, n: int = 3, *, padded: bool = True, left: bool = False) -> Batch:
        """Return inputs with targets; text of unequal lengths where it is padded."""
        generator = torch.Generator().manual_seed(1)
        if self.kind == "image":
            pixels = torch.randn(n, 3, 8, 8, generator=generator, dtype=self.dtype)
            return Batch({"pixel_values": pixels}, torch.randint(_LABELS, (n,), generator=generator))
        length = 7
        ids = torch.randint(3, _VOCABULARY, (n, length), generator=generator)
        mask = torch.ones(n, length, dtype=torch.long)
        if padded:
            for row in range(1, n):
                hidden = slice(0, row % 4) if left else slice(length - row % 4, None)
                mask[row, hidden], ids[row, hidden] = 0, 0
        if self.kind == "causal_classifier" or "Classification" in self.model:
            for row in range(n):  # the classifiers of encoder-decoders read at the end token
                last = int(mask[row].nonzero().max())
                ids[row, last] = 2
        inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": mask}
        if self.kind == "seq2seq":
            inputs["decoder_input_ids"] = torch.randint(3, _VOCABULARY, (n, 4), generator=generator)
        return Batch(inputs, torch.randint(_LABELS, (n,), generator=generator))


FAMILIES = (
    Family("BERT, token classifier", "BertConfig", "BertForTokenClassification", _TEXT),
    Family("BERT, masked LM", "BertConfig", "BertForMaskedLM", _TEXT),
    Family("BERT, classifier", "BertConfig", "BertForSequenceClassification", _TEXT),
    Family("DistilBERT", "DistilBertConfig", "DistilBertForSequenceClassification",
           {"vocab_size": _VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "num_labels": _LABELS}),
    Family("RoBERTa", "RobertaConfig", "RobertaForSequenceClassification", _TEXT),
    Family("XLM-R", "XLMRobertaConfig", "XLMRobertaForSequenceClassification", _TEXT),
    Family("ALBERT", "AlbertConfig", "AlbertForSequenceClassification", {**_TEXT, "embedding_size": 8}),
    Family("ELECTRA", "ElectraConfig", "ElectraForSequenceClassification", {**_TEXT, "embedding_size": 8}),
    Family("DeBERTa-v2", "DebertaV2Config", "DebertaV2ForSequenceClassification",
           {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    Family("MPNet", "MPNetConfig", "MPNetForSequenceClassification", _TEXT),
    Family("ModernBERT", "ModernBertConfig", "ModernBertForSequenceClassification",
           {**_TEXT, "cls_token_id": 1, "sep_token_id": 2, "reference_compile": False}, exact=False),
    Family("GPT-2", "GPT2Config", "GPT2LMHeadModel",
           {"vocab_size": _VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2},
           kind="causal"),
    Family("GPT-2, classifier", "GPT2Config", "GPT2ForSequenceClassification",
           {"vocab_size": _VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "num_labels": _LABELS}, kind="causal"),
    Family("OPT", "OPTConfig", "OPTForCausalLM",
           {**_TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}, kind="causal", exact=False),
    Family("GPT-NeoX", "GPTNeoXConfig", "GPTNeoXForCausalLM", _TEXT, kind="causal", exact=False),
    Family("Llama", "LlamaConfig", "LlamaForCausalLM", _GROUPED, kind="causal", exact=False),
    Family("Llama, classifier", "LlamaConfig", "LlamaForSequenceClassification", _GROUPED, kind="causal", exact=False),
    Family("Mistral", "MistralConfig", "MistralForCausalLM", _GROUPED, kind="causal", exact=False),
    Family("Mixtral", "MixtralConfig", "MixtralForCausalLM",
           {**_GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1}, kind="causal", exact=False, dtype=torch.float32),
    Family("Qwen2", "Qwen2Config", "Qwen2ForCausalLM", _GROUPED, kind="causal", exact=False),
    Family("Qwen3", "Qwen3Config", "Qwen3ForCausalLM", _GROUPED, kind="causal", exact=False),
    Family("Gemma-2", "Gemma2Config", "Gemma2ForCausalLM", _GROUPED, kind="causal", exact=False),
    Family("Gemma-3", "Gemma3TextConfig", "Gemma3ForCausalLM", _GROUPED, kind="causal", exact=False),
    Family("Phi-3", "Phi3Config", "Phi3ForCausalLM", _GROUPED, kind="causal", exact=False),
    Family("SmolLM3", "SmolLM3Config", "SmolLM3ForCausalLM", _GROUPED, kind="causal", exact=False),
    Family("Mamba", "MambaConfig", "MambaForCausalLM",
           {"vocab_size": _VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0},
           maps=0, kind="causal", exact=False),
    Family("BART", "BartConfig", "BartForConditionalGeneration", _BART, maps=6, kind="seq2seq"),
    Family("BART, classifier", "BartConfig", "BartForSequenceClassification", _BART, maps=6),
    Family("T5", "T5Config", "T5ForConditionalGeneration", _T5, maps=6, kind="seq2seq", exact=False),
    Family("T5, classifier", "T5Config", "T5ForSequenceClassification", _T5, maps=6, exact=False),
    Family("T5, token classifier", "T5Config", "T5ForTokenClassification", _T5, exact=False),
    Family("ViT", "ViTConfig", "ViTForImageClassification",
           {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8,
            "patch_size": 4, "num_labels": _LABELS}, kind="image", exact=False),
)  # fmt: skip
"""Every family, smallest first within its kind."""
