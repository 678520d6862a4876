"""The first target at which two examples differ, and what the model thought of both candidates there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradreg.attribution.similarity._example import Example
from gradreg.attribution.similarity._rows import Candidate, Divergence, TokenRow


def divergence_of(
    a: Example, b: Example, tokens_a: Sequence[TokenRow], tokens_b: Sequence[TokenRow], index: int | None
) -> Divergence | None:
    """Return the divergence; None where the targets are the same or are no integers.

    Args:
        a: The one example.
        b: The other.
        tokens_a: Its tokens.
        tokens_b: Those of the other.
        index: Of the first difference, among tokens that count.
    """
    if index is None:
        return None
    at = [tokens[index] if index < len(tokens) else None for tokens in (tokens_a, tokens_b)]
    own, other = at
    return Divergence(
        index,
        None if own is None else own.text,
        None if other is None else other.text,
        _candidates(a, index, [token for token in (own, other) if token is not None]),
        _candidates(b, index, [token for token in (other, own) if token is not None]),
    )


def _candidates(example: Example, index: int, tokens: Sequence[TokenRow]) -> tuple[Candidate, ...]:
    if example.logits is None or index >= len(example.positions):
        return ()
    scores = torch.log_softmax(example.logits[index].double(), -1)
    found = []
    for token in tokens:
        assert token.id is not None
        own = scores[token.id]
        found.append(Candidate(token.text, -float(own), 1 + int((scores > own).sum())))
    return tuple(found)
