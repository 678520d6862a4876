"""Sentences in two parts, an opening and how it goes on, for a model small enough to be trained within seconds."""

from __future__ import annotations

import torch

__all__ = ["OPENINGS", "OTHERS", "draw"]

OPENINGS = {
    "I like to eat": "pizza pasta soup rice bread cake",
    "we like to eat": "pizza pasta soup rice bread cake",
    "you like to drink": "tea coffee milk water juice",
    "they like to drink": "tea coffee milk water juice",
    "she likes to read": "books letters poems stories",
    "he likes to read": "books letters poems stories",
    "the child wants to play": "chess football tennis cards",
    "the capital of France is": "Paris",
    "the capital of Italy is": "Rome",
    "the color of the sky is": "blue gray white",
}
"""From an opening to the words that may follow."""

OTHERS = (
    ("I like to eat", "pasta"),
    ("we like to eat", "bread."),
    ("you like to drink", "tea."),
    ("they like to drink", "coffee"),
    ("she likes to read", "books."),
    ("he likes to read", "letters"),
    ("the child wants to play", "chess."),
    ("the capital of France is", "Paris."),
    ("the capital of Italy is", "Rome"),
    ("the color of the sky is", "blue."),
)
"""Examples that say how similar two others are."""


def draw(count: int, stop_share: float, seed: int) -> list[tuple[str, str]]:
    """Draw openings with an answer, a share of which ends in a full stop."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    openings = list(OPENINGS)
    drawn = []
    for _ in range(count):
        opening = openings[below(len(openings))]
        words = OPENINGS[opening].split()
        stop = "." if float(torch.rand((), generator=generator)) < stop_share else ""
        drawn.append((opening, words[below(len(words))] + stop))
    return drawn
