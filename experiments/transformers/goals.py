"""From texts to what is attributed: the batch, the scalar, and names for its targets; one function per goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import GradregError, closest
from gradreg.experiments.transformers.goal_scalars import Chosen, Classes, Pooled, Predicted, pooled
from gradreg.experiments.transformers.load import Loaded
from gradreg.model import check_readable, longest_text

__all__ = ["GOALS", "Asked", "asked", "goal_of"]


@dataclass(frozen=True)
class Asked:
    """What is attributed.

    Args:
        batch: The tokens.
        of: The scalar.
        texts: What was tokenized, by what the tokens are: `"source"`, `"target prefix"`.
        axes: Names of the axes of targets.
        names: Names of targets, as `gr.Attribution.target_labels`.
        main: For every example the targets that are printed and drawn; None for all.
        titles: Of the examples.
    """

    batch: gr.Batch
    of: Callable[[Any, gr.Batch], Tensor]
    texts: Mapping[str, Sequence[str]]
    axes: tuple[str, ...] = ()
    names: Mapping[str, list[Any]] = field(default_factory=dict)
    main: list[list[tuple[int, ...]]] | None = None
    titles: tuple[str, ...] = ()


def goal_of(model: nn.Module) -> str:
    """Return the goal that fits what sits on top of a model."""
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        if hasattr(model, "prepare_decoder_input_ids_from_labels"):
            return "translation"
    elif name.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return "classes"
    elif name.endswith("ForMaskedLM"):
        return "mask"
    elif gr.scalars.is_causal_language_model(model):
        return "next_token"
    elif not name.partition("For")[2]:
        return "similarity"
    raise GradregError(f"goal: {name} has a head that no goal here fits; load it with another head.")


def asked(loaded: Loaded, goal: str, texts: Sequence[Any] | None, candidates: Any, quantity: str) -> Asked:
    """Return what is attributed.

    Args:
        loaded: The model.
        goal: One of `GOALS`.
        texts: Texts or pairs; None for those that come with the goal.
        candidates: For next_token and mask: how many of the most probable tokens, or a list of texts.
        quantity: One of `QUANTITIES`.

    Raises:
        GradregError: If the goal does not fit the model, or a text the goal.
    """
    fitting = goal_of(loaded.model)
    if goal != fitting and not {goal, fitting} == {"norm", "similarity"}:
        raise GradregError(
            f"goal: {goal!r} does not fit {type(loaded.model).__name__}; allowed are auto and {fitting!r}"
            + (", 'norm'" if fitting == "similarity" else "")
            + ", or load the model with another head."
        )
    build, examples, paired = GOALS[goal]
    given = list(examples) if texts is None else texts
    for place, one in enumerate(given):
        fits = isinstance(one, (list, tuple)) and len(one) == 2 and all(isinstance(part, str) and part for part in one)
        if not (fits if paired else isinstance(one, str) and one):
            wanted = "a pair of texts, such as [A text, Another]" if paired else "a text"
            raise GradregError(f"texts[{place}]: {one!r} is not allowed; goal={goal} needs {wanted}.")
    return build(loaded, given, candidates, quantity)


def _similarity(loaded: Loaded, pairs: Sequence[Any], candidates: Any, quantity: str) -> Asked:
    """Each text of a pair is attributed to while the other stays as it is."""
    texts = [text for pair in pairs for text in pair]
    inputs = _tokens(loaded, texts)
    with torch.no_grad():
        vectors = pooled(loaded.model(**inputs).last_hidden_state, inputs["attention_mask"])
    others = vectors.view(-1, 2, vectors.shape[-1]).flip(1).reshape(vectors.shape)
    titles = tuple(f"pair {n // 2}, text {'ab'[n % 2]}" for n in range(len(texts)))
    return Asked(gr.Batch(inputs, extras={"reference": others}), Pooled("cosine"), {"source": texts}, titles=titles)


def _norm(loaded: Loaded, texts: Sequence[Any], candidates: Any, quantity: str) -> Asked:
    return Asked(gr.Batch(_tokens(loaded, texts)), Pooled("norm"), {"source": texts})


def _classes(loaded: Loaded, texts: Sequence[Any], candidates: Any, quantity: str) -> Asked:
    inputs = _tokens(loaded, texts)
    with torch.no_grad():
        logits = loaded.model(**inputs).logits
    names = {"class": _class_names(loaded.model, logits.shape[-1])}
    batch, of = gr.Batch(inputs), Classes(quantity)
    if logits.dim() == 2:
        return Asked(batch, of, {"source": texts}, ("class",), names)
    best = logits.argmax(-1).tolist()
    real = inputs["attention_mask"].bool().tolist()
    main = [[(t, own[t]) for t in range(len(own)) if mask[t]] for own, mask in zip(best, real, strict=True)]
    return Asked(batch, of, {"source": texts}, ("token", "class"), names, main)


def _next_token(loaded: Loaded, texts: Sequence[Any], candidates: Any, quantity: str) -> Asked:
    inputs = _tokens(loaded, texts)
    return _at(loaded, inputs, texts, inputs["attention_mask"].sum(1) - 1, candidates, quantity)


def _mask(loaded: Loaded, texts: Sequence[Any], candidates: Any, quantity: str) -> Asked:
    mark = loaded.tokenizer.mask_token
    if mark is None:
        raise GradregError(f"goal: the tokenizer of {loaded.name!r} has no mask token.")
    texts = [text.replace("[MASK]", mark) for text in texts]
    inputs = _tokens(loaded, texts)
    masked = inputs["input_ids"] == loaded.tokenizer.mask_token_id
    for place, count in enumerate(masked.sum(1).tolist()):
        if count != 1:
            raise GradregError(f"texts[{place}] has {count} masks; goal=mask needs exactly one, written {mark}.")
    return _at(loaded, inputs, texts, masked.int().argmax(1), candidates, quantity)


def _translation(loaded: Loaded, pairs: Sequence[Any], candidates: Any, quantity: str) -> Asked:
    model: Any = loaded.model
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    inputs = _tokens(loaded, sources)
    rows = [loaded.tokenizer(text_target=text)["input_ids"] for text in targets]
    answers, real = _padded(loaded, rows)
    inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=answers)
    inputs["decoder_attention_mask"] = real
    names = [
        [loaded.tokenizer.decode([row[t]]) if t < len(row) else None for t in range(answers.shape[1])] for row in rows
    ]
    batch = gr.Batch(inputs, extras={"answers": answers})
    main = [[(t,) for t in range(len(row))] for row in rows]
    texts = {"source": sources, "target prefix": targets}
    return Asked(batch, Predicted(quantity), texts, ("token",), {"token": names}, main)


GOALS: dict[str, tuple[Callable[..., Asked], tuple[Any, ...], bool]] = {
    "similarity": (
        _similarity,
        (
            ("A man is eating a pizza in the park.", "Someone eats pizza outdoors."),
            ("The central bank raised its interest rates.", "Borrowing money has become more expensive."),
        ),
        True,
    ),
    "norm": (_norm, ("A man is eating a pizza in the park.",), False),
    "classes": (_classes, ("The film was slow, but I loved every minute of it.",), False),
    "next_token": (_next_token, ("The capital of France is", "The opposite of hot is"), False),
    "mask": (_mask, ("Paris is the [MASK] of France.",), False),
    "translation": (
        _translation,
        (("translate English to German: The house is wonderful.", "Das Haus ist wunderbar."),),
        True,
    ),
}
"""From goal to what builds it, its texts where none are given, and whether these are pairs."""


def _at(
    loaded: Loaded, inputs: dict[str, Tensor], texts: Sequence[str], position: Tensor, candidates: Any, quantity: str
) -> Asked:
    """Ask for some tokens at one position of every example."""
    if isinstance(candidates, int):
        with torch.no_grad():
            logits = loaded.model(**inputs).logits
        rows = logits[torch.arange(len(texts), device=position.device), position]
        ids = rows.topk(min(candidates, rows.shape[-1])).indices
    else:
        one = [_single_token(loaded, text) for text in candidates]
        ids = torch.tensor([one] * len(texts), device=position.device)
    names = [[loaded.tokenizer.decode([token]) for token in row] for row in ids.tolist()]
    batch = gr.Batch(inputs, extras={"position": position, "candidates": ids})
    return Asked(batch, Chosen(quantity), {"source": texts}, ("class",), {"class": names})


def _single_token(loaded: Loaded, text: str) -> int:
    ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = loaded.tokenizer.convert_ids_to_tokens(ids)
        raise GradregError(
            f"candidates: {text!r} is {len(ids)} tokens ({pieces}); give texts of one token (a space in front matters)."
        )
    return int(ids[0])


def _class_names(model: Any, count: int) -> list[str]:
    known = getattr(getattr(model, "config", None), "id2label", None) or {}
    return [str(known.get(n, known.get(str(n), n))) for n in range(count)]


def _tokens(loaded: Loaded, texts: Sequence[str]) -> dict[str, Tensor]:
    """Tokenize, padded on the right, whether or not the tokenizer has a token for that."""
    most = longest_text(loaded.model)
    rows = [loaded.tokenizer(text)["input_ids"] for text in texts]
    for place, row in enumerate(rows):
        if not row or (most is not None and len(row) > most):
            raise GradregError(f"texts: text {place} has {len(row)} tokens; the model takes 1 to {most or 'many'}.")
    ids, mask = _padded(loaded, rows)
    inputs = {"input_ids": ids, "attention_mask": mask}
    check_readable(loaded.model, gr.Batch(inputs), "texts")
    return inputs


def _padded(loaded: Loaded, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    pad = loaded.tokenizer.pad_token_id or 0
    device = next(loaded.model.parameters()).device
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids, mask


def unknown_goal(goal: Any) -> list[str]:
    """Return the problem with the name of a goal, if there is one."""
    if goal == "auto" or goal in GOALS:
        return []
    return [f"goal: {goal!r} is not allowed. Closest: {closest(str(goal), ['auto', *GOALS])}."]
