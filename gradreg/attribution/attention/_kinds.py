"""Kinds of tokens: special ones by name, punctuation, and other; or the user's own."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradreg.attribution._tokens import read_tokens, special_ids
from gradreg.attribution.attention._segments import Segment
from gradreg.errors import BatchError, GradregError

ALL, FIRST, OTHER, PUNCTUATION = "all", "first", "other", "punctuation"

Masks = Mapping[str, Tensor]
Kinds = Mapping[str, Any] | Callable[[Tensor], Masks] | None


def kinds_of(
    segment: Segment, kinds: Kinds, tokenizer: Any, examples: int, *, several: bool, causal: bool
) -> dict[str, Tensor]:
    """Return from kind to which positions are of it, `[n, L]`; nothing where there is but one kind, `"all"`.

    Args:
        segment: The sequence.
        kinds: From name to mask, or from name of segment to such a mapping; or a function of the ids that gives it.
        tokenizer: Tells kinds where none are given.
        examples: n.
        several: Whether the maps run over several segments; masks of no named segment could then be of either.
        causal: Whether the model is a causal language model, whose first tokens are a kind of their own.

    Raises:
        BatchError: If a mask has no such shape.
        GradregError: If masks are needed for a segment and not given.
    """
    if kinds is None:
        if tokenizer is None or segment.ids is None:
            return {}
        return from_tokenizer(tokenizer, segment.ids, segment.valid, first=causal)
    masks: Any = kinds
    if callable(kinds):
        if segment.ids is None:
            raise GradregError(
                f"kinds is called with the token ids of the {segment.name}, which the batch does not hold "
                f"({_where(segment.name)}). Give masks instead: kinds={{{segment.name!r}: {{name: mask}}}}."
            )
        masks = kinds(segment.ids)
    elif not isinstance(kinds, Mapping):
        raise GradregError(
            f"kinds={kinds!r}; allowed are a mapping from name to mask, or from 'source' and 'target' to such mappings, a "
            "function of the token ids that returns one, and None."
        )
    elif all(isinstance(value, Mapping) for value in kinds.values()):
        masks = kinds.get(segment.name, {})
    elif several:
        raise GradregError(
            "The maps run over several sequences, and kinds does not say which its masks belong to. Give them by name: "
            'kinds={"source": {name: mask}, "target": {name: mask}}; a sequence that is left out has one kind, "all".'
        )
    if not isinstance(masks, Mapping):
        raise GradregError(f"kinds gives a {type(masks).__name__}; it has to be a mapping from name to mask [n, L].")
    return {str(name): _checked(str(name), mask, segment, examples) for name, mask in masks.items()}


def from_tokenizer(
    tokenizer: Any, ids: Tensor, valid: Tensor | None = None, *, first: bool = False
) -> dict[str, Tensor]:
    """Return the kinds that a tokenizer tells: special tokens by name, as they occur, then punctuation and other.

    Punctuation is what consists of characters of the unicode categories P, without the marks of the tokenizer.

    Args:
        tokenizer: Of transformers.
        ids: `[n, L]`.
        valid: Which of them are real, `[n, L]`; others are named only if they are real elsewhere.
        first: Make a kind of the first real tokens that are not special.

    Raises:
        GradregError: If an id is not in the vocabulary.
    """
    real = ids.T if valid is None else ids.T[valid.T]
    distinct = list(dict.fromkeys(real.flatten().tolist()))
    specials = special_ids(tokenizer)
    tokens = dict(zip(distinct, read_tokens(tokenizer, distinct), strict=True))
    kinds: dict[str, list[int]] = {}
    for one in distinct:
        if one in specials:
            kinds.setdefault(tokens[one].label, []).append(one)
    spelled = {
        one: token.data.decode("utf-8", errors="replace").strip()
        for one, token in tokens.items()
        if one not in specials
    }
    kinds[PUNCTUATION] = [one for one, text in spelled.items() if is_punctuation(text)]
    kinds[OTHER] = [one for one, text in spelled.items() if not is_punctuation(text)]
    masks = {
        name: torch.isin(ids, torch.tensor(own, dtype=ids.dtype, device=ids.device)) for name, own in kinds.items()
    }
    if not first:
        return masks
    real_ones = torch.ones_like(ids) if valid is None else valid.long()
    start = (real_ones.cumsum(1) == 1) & (real_ones == 1) & (masks[PUNCTUATION] | masks[OTHER])
    if not bool(start.any()):
        return masks
    rest = {name: masks.pop(name) & ~start for name in (PUNCTUATION, OTHER)}
    return {**masks, FIRST: start, **rest}


def is_punctuation(text: str) -> bool:
    """Whether a text is punctuation and nothing else.

    Example:
        >>> from gradreg.attribution.attention._kinds import is_punctuation
        >>> [is_punctuation(text) for text in (".", "?!", "don't", "")]
        [True, True, False, False]
    """
    return bool(text) and all(unicodedata.category(letter).startswith("P") for letter in text)


def _checked(name: str, given: Any, segment: Segment, examples: int) -> Tensor:
    length = None if segment.ids is None else segment.ids.shape[1]
    mask: Tensor = given if isinstance(given, Tensor) else torch.empty(0)
    fits = isinstance(given, Tensor) and mask.dim() == 2 and mask.shape[0] == examples
    if not fits or (length is not None and mask.shape[1] != length):
        shape = f"has shape {tuple(mask.shape)}" if isinstance(given, Tensor) else f"is a {type(given).__name__}"
        raise BatchError(
            f"kinds[{name!r}] {shape}; a mask says of every position of the {segment.name} whether it is of that kind, "
            f"[{examples}, {length or 'L'}]."
        )
    if mask.dtype != torch.bool:
        raise BatchError(f"kinds[{name!r}] is {mask.dtype}; masks are torch.bool.")
    return mask


def _where(segment: str) -> str:
    return {"source": "input_ids", "target": "decoder_input_ids"}.get(segment, "hidden states from elsewhere")
