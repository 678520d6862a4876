"""From the scores of tokens to those of words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradreg.attribution._fields import Fields
from gradreg.attribution._look import TOKEN, target_names
from gradreg.attribution._tokens import read_tokens
from gradreg.attribution._words import Word, by_offsets, by_text, by_tokens
from gradreg.errors import GradregError

__all__ = ["into_words", "with_tokens"]

Some = TypeVar("Some", bound=Fields)


def with_tokens(a: Some, tokenizer: Any) -> Some:
    """Name positions by their tokens; see `Attribution.with_tokens`."""
    if not a.ids:
        raise GradregError("This attribution has no token ids, so a tokenizer cannot name its positions; set labels.")
    labels = {
        key: [[token.label for token in read_tokens(tokenizer, row)] for row in ids.tolist()]
        for key, ids in a.ids.items()
    }
    return dataclasses.replace(a, labels={**a.labels, **labels})


def into_words(a: Some, tokenizer: Any, texts: Any, offsets: Any) -> Some:
    """Sum the scores of the tokens of every word; see `Attribution.words`."""
    if a.per != "token":
        raise GradregError("Words are sums over tokens, and these scores are per feature; ask for per='token'.")
    if offsets is not None and texts is None:
        raise GradregError("Offsets count characters of a text: give texts too.")
    if offsets is None and tokenizer is None:
        raise GradregError(
            "How tokens make words is told by a tokenizer, or by texts and offsets; give one of the two."
        )
    texts, offsets = _of_keys("texts", texts, a), _of_keys("offsets", offsets, a)
    scores, valid, labels = {}, {}, {}
    for key in a.by_key:
        words = []
        for example in range(a.by_key[key].shape[0]):
            real = _real_positions(a, key, example)
            found = _words(a, key, example, real, tokenizer, texts.get(key), offsets.get(key))
            # words were told from real positions alone
            words.append([Word(one.label, tuple(real[place] for place in one.positions)) for one in found])
        scores[key] = _sums(a.by_key[key], words)
        width = scores[key].shape[-1]
        valid[key] = torch.tensor([[n < len(row) for n in range(width)] for row in words]).view(len(words), width)
        labels[key] = [[one.label for one in row] + [""] * (width - len(row)) for row in words]
    names = dict(a.target_labels)
    if TOKEN in a.target_axes and TOKEN not in names:  # targets stay tokens
        axis = a.target_axes.index(TOKEN)
        known = a if a.labels or tokenizer is None or not a.ids else with_tokens(a, tokenizer)
        names[TOKEN] = [target_names(known, axis, example) for example in range(next(iter(scores.values())).shape[0])]
    return dataclasses.replace(
        a,
        by_key=scores,
        valid=valid,
        labels=labels,
        ids={},
        target_labels=names,
        provenance={**a.provenance, "sources": "words"},
    )


def _words(a: Fields, key: str, example: int, real: list[int], tokenizer: Any, texts: Any, offsets: Any) -> list[Word]:
    where = f"{key!r}, example {example}"
    if offsets is not None:
        pairs = offsets[example].tolist() if isinstance(offsets[example], Tensor) else offsets[example]
        if len(pairs) != a.by_key[key].shape[-1]:
            raise GradregError(
                f"{where}: there are {len(pairs)} offsets for {a.by_key[key].shape[-1]} positions; give one pair for each."
            )
        return by_offsets([(int(pairs[place][0]), int(pairs[place][1])) for place in real], texts[example], where)
    if key not in a.ids:
        raise GradregError(f"There are no token ids for {key!r}, which a tokenizer needs; give texts and offsets.")
    ids = a.ids[key][example].tolist()
    ids = [ids[place] for place in real]
    if texts is None:
        return by_tokens(read_tokens(tokenizer, ids))
    return by_text(tokenizer, ids, texts[example], where)


def _real_positions(a: Fields, key: str, example: int) -> list[int]:
    if key in a.valid:
        return [int(place) for place in a.valid[key][example].nonzero()[:, 0]]
    return list(range(a.by_key[key].shape[-1]))


def _sums(scores: Tensor, words: Sequence[Sequence[Word]]) -> Tensor:
    """Return `[n, *targets, most words]`."""
    width = max(map(len, words))
    sums = []
    for own, row in zip(scores, words, strict=True):
        positions = [place for word in row for place in word.positions]
        numbers = [n for n, word in enumerate(row) for _ in word.positions]
        index = torch.tensor(numbers, dtype=torch.long, device=own.device)
        taken = own[..., torch.tensor(positions, dtype=torch.long, device=own.device)]
        sums.append(own.new_zeros(*own.shape[:-1], width).index_add(-1, index, taken))
    return torch.stack(sums)


def _of_keys(name: str, given: Any, a: Fields) -> Mapping[str, Any]:
    """Return what was given by key, each with one item per example."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        if len(a.by_key) > 1:
            raise GradregError(f"There are several keys, so {name} is a mapping from {', '.join(map(repr, a.by_key))}.")
        given = dict.fromkeys(a.by_key, given)
    by_key: Mapping[str, Any] = given
    count = next(iter(a.by_key.values())).shape[0]
    for key in a.by_key:
        if key not in by_key:
            raise GradregError(f"{name} has nothing for the key {key!r}.")
        if isinstance(by_key[key], str) or len(by_key[key]) != count:
            found = "one text" if isinstance(by_key[key], str) else f"{len(by_key[key])} items"
            raise GradregError(f"{name} has {found} for {key!r}; give a list of {count}, one for each example.")
    return by_key
