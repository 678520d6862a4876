"""From two texts to an example of a model: inputs and labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradreg.errors import GradregError, closest
from gradreg.experiments.transformers.load import Loaded
from gradreg.scalars import is_causal_language_model

__all__ = ["as_example", "kind_of"]


def kind_of(loaded: Loaded) -> str:
    """Return what a model is: `"seq2seq"`, `"causal"`, `"masked"` or `"classifier"`.

    Raises:
        GradregError: If it is something else.
    """
    name = type(loaded.model).__name__
    if getattr(getattr(loaded.model, "config", None), "is_encoder_decoder", False) and "Conditional" in name:
        return "seq2seq"
    if is_causal_language_model(loaded.model):
        return "causal"
    for ending, kind in (("MaskedLM", "masked"), ("SequenceClassification", "classifier")):
        if name.endswith(ending):
            return kind
    raise GradregError(
        f"model: {loaded.name} is a {name}, which has no loss of a text. Allowed are sequence-to-sequence, causal and masked "
        "language models and sequence classifiers; head= reads the folder as one of them, if it has the weights."
    )


def as_example(loaded: Loaded, text: str, target: str, *, end: bool = True) -> dict[str, Tensor]:
    """Return one example as a mapping with labels.

    Args:
        loaded: Model and tokenizer.
        text: What the model is given: the source, the prompt (which may be empty), or the text with a mask.
        target: What it shall answer: the target, how the text goes on, what the mask stands for, or the class.
        end: Whether a causal model's target is followed by its end token; targets of seq2seq models end as their tokenizer
            says.

    Raises:
        GradregError: If nothing is left to predict, a masked model's text has no mask, or there is no such class.
    """
    kind, tokenizer = kind_of(loaded), loaded.tokenizer
    if kind == "seq2seq":
        return {**_row(tokenizer(text).input_ids), "labels": torch.tensor([tokenizer(target).input_ids])}
    if kind == "causal":
        prompt = tokenizer(text).input_ids if text else []
        answer = list(tokenizer(target, add_special_tokens=False).input_ids)
        if end and tokenizer.eos_token_id is not None:
            answer.append(tokenizer.eos_token_id)
        if not answer or len(prompt) + len(answer) < 2:
            raise GradregError(f"target {target!r} has no token to predict.")
        return {**_row([*prompt, *answer]), "labels": torch.tensor([[-100] * len(prompt) + answer])}
    if kind == "masked":
        return _masked(tokenizer, text, target)
    return {**_row(tokenizer(text).input_ids), "labels": torch.tensor([_class(loaded, target)])}


def _row(ids: list[int]) -> dict[str, Tensor]:
    tokens = torch.tensor([ids])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _masked(tokenizer: Any, text: str, target: str) -> dict[str, Tensor]:
    mask = tokenizer.mask_token
    if mask is None or text.count(mask) != 1:
        raise GradregError(f"input {text!r} needs one {mask}: the place of the target, which may be several tokens.")
    answer = tokenizer(target, add_special_tokens=False).input_ids
    if not answer:
        raise GradregError(f"target {target!r} has no token to predict.")
    tokens = torch.tensor([tokenizer(text.replace(mask, mask * len(answer))).input_ids])
    places = tokens == tokenizer.mask_token_id
    labels = torch.full_like(tokens, -100)
    labels[places] = torch.tensor(answer)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _class(loaded: Loaded, target: str) -> int:
    names = {str(name): int(index) for index, name in loaded.model.config.id2label.items()}
    if target in names:
        return names[target]
    if target.isdigit() and int(target) < len(names):
        return int(target)
    raise GradregError(
        f"target {target!r} is no class of {loaded.name}; classes are {closest(target, names)} and their numbers."
    )
