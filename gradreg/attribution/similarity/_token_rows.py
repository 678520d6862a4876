"""The tables of target tokens, and where those of two examples part."""

from __future__ import annotations

import difflib
from dataclasses import replace

from torch import Tensor

from gradreg.attribution.similarity._example import Example
from gradreg.attribution.similarity._rows import TokenRow
from gradreg.attribution.similarity._texts import Special


def token_rows(
    examples: tuple[Example, Example],
    texts: tuple[list[str], list[str]],
    gram: Tensor,
    special: Special,
    prompts: tuple[int, int],
) -> tuple[list[TokenRow], list[TokenRow], int | None]:
    """Return the rows of a and b, and the index of the first different target; None where there is none.

    Args:
        examples: a and b.
        texts: Of their targets.
        gram: Gram matrix of the tokens of a, then of b.
        special: Which ids are special.
        prompts: How many labels at the start are the prompt.
    """
    first = len(examples[0].positions)
    places = slice(0, first), slice(first, first + len(examples[1].positions))
    a, b = (
        _rows(example, own, gram[at, at], special, prompt)
        for example, own, at, prompt in zip(examples, texts, places, prompts, strict=True)
    )
    marked_a, marked_b, index = _compared(a, b)
    # a class is no text that goes on: no class is new, and there is no prefix
    return (a, b, index) if examples[0].classes else (marked_a, marked_b, index)


def _rows(
    example: Example,
    texts: list[str],
    gram: Tensor,
    special: Special,
    prompt: int,
) -> list[TokenRow]:
    shares, norms = (gram.sum(1) / gram.sum()).tolist(), gram.diagonal().clamp(min=0).sqrt().tolist()
    ids = example.ids or (None,) * len(example.positions)
    # positions are those of the scalar's targets; labels of a causal model lie one further
    offset = example.offset
    return [
        TokenRow(
            place + offset,
            one,
            text,
            loss,
            norm,
            share,
            end=one in special.ends,
            special=one in special.all,
            prompt=place + offset < prompt,
        )
        for place, one, text, loss, norm, share in zip(
            example.positions, ids, texts, example.losses, norms, shares, strict=True
        )
    ]


def _compared(a: list[TokenRow], b: list[TokenRow]) -> tuple[list[TokenRow], list[TokenRow], int | None]:
    """Mark shared prefix and new tokens, and return the index of the first difference; None where there is none."""
    if any(token.id is None for token in (*a, *b)):
        return a, b, None
    ids_a, ids_b = [token.id for token in a], [token.id for token in b]
    common = 0
    while common < min(len(a), len(b)) and ids_a[common] == ids_b[common]:
        common += 1
    matched_a, matched_b = set(), set()
    for block in difflib.SequenceMatcher(None, ids_a, ids_b, autojunk=False).get_matching_blocks():
        matched_a |= set(range(block.a, block.a + block.size))
        matched_b |= set(range(block.b, block.b + block.size))
    marked_a = [replace(token, shared=i < common, new=i not in matched_a) for i, token in enumerate(a)]
    marked_b = [replace(token, shared=i < common, new=i not in matched_b) for i, token in enumerate(b)]
    return marked_a, marked_b, common if common < max(len(a), len(b)) else None
