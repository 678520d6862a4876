"""A T5 of two plus two layers, trained here on sentences: no download, the same numbers for the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from gradreg.experiments.transformers.load import Loaded
from gradreg.experiments.transformers.sentences import OPENINGS, draw

__all__ = ["train_t5", "word_tokenizer"]

_BATCH = 32


def word_tokenizer() -> Any:
    """Return a tokenizer with one token per word and per full stop, which ends sequences as T5's does."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    text = " ".join([*OPENINGS, *OPENINGS.values()])
    words = ["<pad>", "</s>", "<unk>", ".", *sorted(set(text.split()))]
    tokenizer = Tokenizer(WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids"],
    )


def train_t5(*, steps: int, seed: int, stop_share: float = 0.8, progress: bool = True) -> Loaded:
    """Train, and return the model in eval mode with its tokenizer.

    Args:
        steps: Of AdamW, 32 sentences each.
        seed: Of weights, sentences and dropout; the process's own random stream is left alone.
        stop_share: Share of targets that end in a full stop.
        progress: Show a progress bar on terminals.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer = word_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=len(tokenizer),
                d_model=64,
                d_kv=16,
                d_ff=128,
                num_layers=2,
                num_heads=4,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                decoder_start_token_id=tokenizer.pad_token_id,
            )
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sentences = draw(steps * _BATCH, stop_share, seed)
        for step in tqdm(range(steps), desc="training a small T5", disable=None if progress else True):
            some = sentences[step * _BATCH : (step + 1) * _BATCH]
            inputs = tokenizer([opening for opening, _ in some], padding=True, return_tensors="pt")
            labels = tokenizer([answer for _, answer in some], padding=True, return_tensors="pt").input_ids
            labels = labels.masked_fill(labels == tokenizer.pad_token_id, -100)
            loss = model(
                input_ids=inputs.input_ids, attention_mask=inputs.input_ids != tokenizer.pad_token_id, labels=labels
            ).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Loaded("t5", model.eval(), tokenizer, Path())
