"""Targets as text, and which of them are special."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradreg.attribution.similarity._example import Example
from gradreg.errors import GradregError


def texts_of(example: Example, model: nn.Module, tokenizer: Any) -> list[str]:
    """Return the targets as people read them: class names, tokens, or `#7` without a tokenizer."""
    if example.ids is None:
        return [f"target {place}" for place in example.positions]
    if example.classes:
        names = getattr(getattr(model, "config", None), "id2label", None) or {}
        return [str(names.get(one, f"class {one}")) for one in example.ids]
    if tokenizer is None:
        return [f"#{one}" for one in example.ids]
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return [_token_text(tokenizer, one) for one in example.ids]
    given = tokenizer(list(example.ids))
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise GradregError(f"tokenizer gave a {type(given).__name__} for token ids; a text per id is needed.")
    found = [str(text) for text in given]
    if len(found) != len(example.ids):
        raise GradregError(
            f"tokenizer gave {len(found)} texts for {len(example.ids)} token ids; one text per id is needed."
        )
    return found


def _token_text(tokenizer: Any, one: int) -> str:
    token = tokenizer.convert_ids_to_tokens(one)
    if token is None:
        return f"#{one}"
    text = str(tokenizer.decode([one], clean_up_tokenization_spaces=False))
    if not text or "�" in text:
        return str(token)  # part of a letter
    # SentencePiece drops the space that the token stands for
    return text if not str(token).startswith("▁") or text.startswith(" ") else f" {text}"


@dataclass(frozen=True)
class Special:
    """Ids that stand for no text: those that end a sequence, and all of them."""

    ends: frozenset[int] = frozenset()
    all: frozenset[int] = frozenset()


def special_ids(model: nn.Module, tokenizer: Any, *, classes: bool) -> Special:
    """Return the special ids of tokenizer and configurations; none where targets are classes."""
    if classes:
        return Special()
    ends: set[int] = set()
    others: set[int] = set()
    for source in (tokenizer, getattr(model, "config", None), getattr(model, "generation_config", None)):
        ends |= _ids(getattr(source, "eos_token_id", None))
        for name in ("bos", "pad", "sep", "cls", "decoder_start"):
            others |= _ids(getattr(source, f"{name}_token_id", None))
    others |= _ids(list(getattr(tokenizer, "all_special_ids", ()) or ())) - _ids(
        getattr(tokenizer, "unk_token_id", None)
    )
    return Special(frozenset(ends), frozenset(ends | others))


def _ids(found: Any) -> set[int]:
    items: Sequence[Any] = found if isinstance(found, (list, tuple)) else [found]
    return {int(one) for one in items if isinstance(one, int) and not isinstance(one, bool)}


def shown(text: str) -> str:
    """Return a token as one visible word."""
    return re.sub(r"\s", lambda found: {"\n": "⏎", "\t": "⇥"}.get(found[0], "·"), text) or "''"
