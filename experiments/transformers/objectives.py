"""What a model is asked with texts alone: a batch, and the scalar to differentiate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.experiments.transformers.load import Loaded
from gradreg.model import longest_text
from gradreg.scalars import IGNORED_LABEL, ScalarFunction

__all__ = ["OBJECTIVES", "Contrastive", "Question", "ask"]


@dataclass(frozen=True)
class Question:
    """A batch and what is differentiated.

    Args:
        batch: Token ids, masks and targets.
        of: The scalar.
        per: `"batch"` where examples depend on each other, else `"example"`.
        texts: What was tokenized, in order.
    """

    batch: gr.Batch
    of: ScalarFunction
    per: str
    texts: list[tuple[str, ...]]


@dataclass(frozen=True)
class Contrastive:
    r"""In-batch contrastive loss of sentence vectors (means over real tokens), in nats.

    Rows 2i and 2i + 1 belong together; of row i, with partner p(i),
    $-\log \frac{\exp(\cos_{i p(i)} / \tau)}{\sum_{j \neq i} \exp(\cos_{ij} / \tau)}$, divided by the number of rows, so that
    the sum over the batch is the mean loss.

    References:
        Chen, Kornblith, Norouzi, Hinton (2020), SimCLR, arXiv:2002.05709, equation 1.
    """

    temperature: float = 0.05

    def __call__(self, outputs: Any, batch: gr.Batch) -> Tensor:
        """Return the parts of the loss, `[n]`."""
        states = getattr(outputs, "last_hidden_state", None)
        if states is None:
            raise GradregError(
                f"of: contrastive needs a model without a head, head=none; the outputs are a {type(outputs).__name__}."
            )
        mask = batch.inputs["attention_mask"].unsqueeze(-1)
        vectors = F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
        n = len(vectors)
        own = torch.eye(n, dtype=torch.bool, device=vectors.device)
        cosines = (vectors @ vectors.T / self.temperature).masked_fill(own, -torch.inf)
        partners = torch.arange(n, device=vectors.device) ^ 1
        return F.cross_entropy(cosines, partners, reduction="none") / n


def ask(loaded: Loaded, name: str, texts: Sequence[tuple[str, ...]], max_length: int, temperature: float) -> Question:
    """Return the question of that name.

    Args:
        loaded: The model.
        name: One of `OBJECTIVES`, or `"auto"`: what the model was made for.
        texts: One text an entry; or, for pairs, two.
        max_length: Tokens at most.
        temperature: Of the contrastive loss.

    Raises:
        GradregError: If the model or the texts do not serve it.
    """
    chosen = _made_for(loaded) if name == "auto" else name
    return OBJECTIVES[chosen](loaded, list(texts), max_length, temperature)


def _made_for(loaded: Loaded) -> str:
    kind = type(loaded.model).__name__
    if getattr(loaded.model.config, "is_encoder_decoder", False) and "ConditionalGeneration" in kind:
        return "translation"
    for ending, name in (("CausalLM", "next_token"), ("LMHeadModel", "next_token"), ("MaskedLM", "masked_token")):
        if kind.endswith(ending):
            return name
    return "predicted_class" if kind.endswith("ForSequenceClassification") else "contrastive"


def _contrastive(loaded: Loaded, texts: list[tuple[str, ...]], max_length: int, temperature: float) -> Question:
    if all(len(one) == 2 for one in texts):
        texts = [(part,) for pair in texts for part in pair]
    if any(len(one) != 1 for one in texts) or len(texts) % 2 or len(texts) < 4:
        raise GradregError(
            f"of: contrastive needs two pairs of texts or more: two texts a line with a tab between, or an even number of lines, "
            f"the first two of which belong together, and so on; found {len(texts)} texts."
        )
    inputs = _encoded(loaded, texts, max_length)
    return Question(gr.Batch(inputs), Contrastive(temperature), "batch", texts)


def _next_token(loaded: Loaded, texts: list[tuple[str, ...]], max_length: int, temperature: float) -> Question:
    inputs = _encoded(loaded, texts, max_length)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED_LABEL)
    return Question(gr.Batch(inputs, labels), gr.loss(F.cross_entropy, mean=True), "example", texts)


def _masked_token(loaded: Loaded, texts: list[tuple[str, ...]], max_length: int, temperature: float) -> Question:
    """Every seventh token that is not special is masked, about the share that BERT was trained with."""
    tokenizer = loaded.tokenizer
    if tokenizer.mask_token_id is None:
        raise GradregError(f"of: masked_token needs a mask token, which the tokenizer of {loaded.name} does not have.")
    inputs = _encoded(loaded, texts, max_length)
    ids = inputs["input_ids"]
    plain = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids, device=ids.device))
    masked = plain & ((plain.cumsum(1) - 1) % 7 == 3)
    short = ~masked.any(1)
    masked[short] = (plain & (plain.cumsum(1) == 1))[short]
    if not bool(masked.any(1).all()):
        raise GradregError("of: masked_token finds a text without a token to mask.")
    labels = ids.masked_fill(~masked, IGNORED_LABEL)
    inputs["input_ids"] = ids.masked_fill(masked, tokenizer.mask_token_id)
    return Question(gr.Batch(inputs, labels), gr.loss(F.cross_entropy, mean=True), "example", texts)


def _translation(loaded: Loaded, texts: list[tuple[str, ...]], max_length: int, temperature: float) -> Question:
    if any(len(one) != 2 for one in texts):
        raise GradregError("of: translation needs a source and a target in every line of the text, with a tab between.")
    inputs = _encoded(loaded, [(one[0],) for one in texts], max_length)
    target = _encoded(loaded, [(one[1],) for one in texts], max_length)
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, IGNORED_LABEL)
    inputs["decoder_input_ids"] = loaded.model.prepare_decoder_input_ids_from_labels(labels=labels)
    return Question(gr.Batch(inputs, labels), gr.loss(F.cross_entropy, mean=True), "example", texts)


def _predicted_class(loaded: Loaded, texts: list[tuple[str, ...]], max_length: int, temperature: float) -> Question:
    return Question(gr.Batch(_encoded(loaded, texts, max_length)), gr.top_logit(), "example", texts)


def _encoded(loaded: Loaded, texts: list[tuple[str, ...]], max_length: int) -> dict[str, Tensor]:
    tokenizer = loaded.tokenizer
    if tokenizer.pad_token_id is None and len(texts) > 1:
        tokenizer.pad_token = tokenizer.eos_token  # hidden by the mask, so any token will do
    most = longest_text(loaded.model)
    max_length = max_length if most is None else min(max_length, most)
    columns = [list(column) for column in zip(*texts, strict=True)]
    found = tokenizer(*columns, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    device, known = next(loaded.model.parameters()).device, inspect.signature(loaded.model.forward).parameters
    # tokenizers know token types whose models do not
    return {name: value.to(device) for name, value in found.items() if name in known}


OBJECTIVES: dict[str, Callable[[Loaded, list[tuple[str, ...]], int, float], Question]] = {
    "contrastive": _contrastive,
    "next_token": _next_token,
    "masked_token": _masked_token,
    "translation": _translation,
    "predicted_class": _predicted_class,
}
"""From name to what makes the question."""
