"""Rows of the report: plain values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenRow:
    r"""One target token of an example; for a classifier the example is the only one.

    Attributes:
        position: Where its target stands among the labels.
        id: Of the target; None where the scalar has no integer targets.
        text: The target.
        loss: The scalar there, in nats for cross-entropy.
        norm: $|g_t|$.
        share: $g_t \cdot G / |G|^2$ with $G = \sum_t g_t$: adds up to 1, negative where the token pulls against the rest.
        end: Whether it is an end-of-sequence token.
        special: Whether it is a special token, ends included.
        prompt: Whether it belongs to the prompt.
        shared: Whether it lies before the first position at which the targets of the two examples differ, as far as is known.
        new: Whether it has no counterpart in the other example, in an alignment that keeps the order.
    """

    position: int
    id: int | None
    text: str
    loss: float
    norm: float
    share: float
    end: bool = False
    special: bool = False
    prompt: bool = False
    shared: bool = True
    new: bool = False


@dataclass(frozen=True)
class GroupRow:
    """A group of parameters.

    Attributes:
        name: Of the group.
        parameters: Their names; a tied parameter goes by its first one.
        numel: Their numbers.
        share_a: Share of the squared norm of the gradient of a.
        share_b: Of b.
        cosine: Between the parts of the two gradients; None where one is zero.
        contribution: What the group adds to the cosine: contributions sum to it.
    """

    name: str
    parameters: tuple[str, ...]
    numel: int
    share_a: float
    share_b: float
    cosine: float | None
    contribution: float


@dataclass(frozen=True)
class WhatIf:
    """The cosine after a change, from the Gram matrices alone.

    Attributes:
        cosine: None where nothing is left of an example.
        dot: The inner product.
        dropped_a: Tokens of a that are left out.
        dropped_b: Of b.
        text: What was changed.
    """

    cosine: float | None
    dot: float
    dropped_a: tuple[str, ...] = ()
    dropped_b: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Candidate:
    """A token at the first different position, as one of the two examples sees it: text, loss in nats, rank from 1."""

    text: str
    loss: float
    rank: int


@dataclass(frozen=True)
class Divergence:
    """The first target at which the examples differ.

    Attributes:
        index: Its number among the targets that count.
        text_a: The target of a; None where a has ended.
        text_b: Of b.
        in_a: The targets of both, under the prediction of a there; own target first.
        in_b: Under that of b.
    """

    index: int
    text_a: str | None
    text_b: str | None
    in_a: tuple[Candidate, ...] = ()
    in_b: tuple[Candidate, ...] = ()


@dataclass(frozen=True, eq=False)
class Cell:
    """The Gram matrix of some parameters over the tokens of a, then of b.

    Attributes:
        group: The group they belong to.
        kind: `"embeddings"`, `"norms"`, `"attention"`, `"mlp"`, `"head"` or `"other"`.
        parameters: Their names.
        numel: Their numbers.
        gram: `[tokens_a + tokens_b, tokens_a + tokens_b]`, float64.
    """

    group: str
    kind: str
    parameters: tuple[str, ...]
    numel: int
    gram: Tensor
