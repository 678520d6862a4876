"""Words: which tokens belong together, by the text that they cover."""

from __future__ import annotations

import contextlib
import itertools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradreg.attribution._tokens import Token, special_ids
from gradreg.errors import GradregError

__all__ = ["Word", "by_offsets", "by_text", "by_tokens"]

Span = tuple[int, int] | None
"""Where a token lies in the text; None for special tokens."""


@dataclass(frozen=True)
class Word:
    """A word: its text, and which positions it is made of."""

    label: str
    positions: tuple[int, ...]


def by_tokens(tokens: Sequence[Token]) -> list[Word]:
    """Group tokens by the text that they spell together."""
    ends = [0, *itertools.accumulate(len(token.data) for token in tokens)]
    text, letter = _letters(b"".join(token.data for token in tokens))
    # a letter of which only some bytes lie in a token is covered by it
    spans: list[Span] = [
        None if token.special else (letter[start], letter[stop - 1] + 1 if stop > start else letter[start])
        for token, (start, stop) in zip(tokens, itertools.pairwise(ends), strict=True)
    ]
    return _group(spans, text, [token.label for token in tokens])


def by_offsets(offsets: Sequence[tuple[int, int]], text: str, where: str) -> list[Word]:
    """Group tokens by a tokenizer's offset mapping, in which special tokens have the empty span (0, 0).

    Raises:
        GradregError: If an offset lies outside the text.
    """
    for place, (start, stop) in enumerate(offsets):
        if not 0 <= start <= stop <= len(text):
            raise GradregError(
                f"{where}: the offset {(start, stop)} at position {place} lies outside of the text, which has "
                f"{len(text)} characters."
            )
    spans = [None if (start, stop) == (0, 0) else (start, stop) for start, stop in offsets]
    return _group(spans, text, ["" if span is None else text[slice(*span)] for span in spans])


def by_text(tokenizer: Any, ids: Sequence[int], text: str | Sequence[str], where: str) -> list[Word]:
    """Group tokens by where the tokenizer finds them in the text, or in a pair of texts.

    Raises:
        GradregError: If the tokenizer has no offsets, or the text does not give the ids.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise GradregError(
            f"{type(tokenizer).__name__} gives no offsets, for it is not a fast tokenizer; leave out texts, or give offsets."
        )
    parts = [text] if isinstance(text, str) else list(text)
    encoded = tokenizer(*parts, return_offsets_mapping=True)
    specials = special_ids(tokenizer)
    starts = [0]  # of each part in all of them, one after the other
    for part in parts:
        starts.append(starts[-1] + len(part) + 1)
    found: list[tuple[int, Span]] = [
        (one, (starts[part] + start, starts[part] + stop))
        for one, part, (start, stop) in zip(
            encoded["input_ids"], encoded.sequence_ids(0), encoded["offset_mapping"], strict=True
        )
        if part is not None and one not in specials
    ]
    rest = iter(found)
    spans: list[Span] = []
    for place, one in enumerate(ids):
        if int(one) in specials:  # they lie elsewhere, or are missing, where the ids were made with other settings
            spans.append(None)
            continue
        expected, span = next(rest, (None, None))
        if expected != int(one):
            raise GradregError(
                f"{where}: the id {int(one)} at position {place} is not what the tokenizer makes of the text there "
                f"({expected}); give the texts and the tokenizer that the ids were made with."
            )
        spans.append(span)
    labels = tokenizer.convert_ids_to_tokens([int(one) for one in ids])
    return _group(spans, "\n".join(parts), labels)


def _group(spans: Sequence[Span], text: str, labels: Sequence[str]) -> list[Word]:
    """Put tokens together that share a word of the text; a token that covers several words joins them."""
    word_of = _words_of(text)
    groups: list[tuple[list[int], set[int]]] = []
    waiting: list[int] = []  # positions of spaces, which go with the word behind them
    for place, span in enumerate(spans):
        touched = set() if span is None else {word for word in word_of[slice(*span)] if word >= 0}
        if span is not None and not touched:
            if text[slice(*span)].strip(" "):  # the end of a line
                groups += [([one], set()) for one in [*waiting, place]]
                waiting = []
            else:
                waiting.append(place)
            continue
        if span is None:
            groups += [([one], set()) for one in [*waiting, place]]
        elif groups and groups[-1][1] & touched:  # then none that waits covers anything, for a space would part the two
            groups[-1][0].extend([*waiting, place])
            groups[-1][1].update(touched)
        else:
            groups.append(([*waiting, place], touched))
        waiting = []
    groups += [([one], set()) for one in waiting]
    words = []
    for positions, _ in groups:
        covered = [span for place in positions if (span := spans[place]) is not None]
        label = text[min(s for s, _ in covered) : max(e for _, e in covered)] if covered else labels[positions[0]]
        words.append(Word(label.strip(" ") or label, tuple(positions)))
    return words


def _words_of(text: str) -> list[int]:
    """Return the number of the word that every character belongs to, -1 for white space.

    Letters, digits, marks and underscores make a word, also across an apostrophe between letters and a point or comma
    between digits. Every other character is a word of its own, as is one of a script written without spaces.
    """
    words: list[int] = []
    count, kind = -1, ""  # kind of the word of the last character: a letter's, a sign's, or white space
    for place, character in enumerate(text):
        if character.isspace():
            kind = ""
            words.append(-1)
            continue
        category = unicodedata.category(character)
        if kind and _adds_to_the_last(category, character, text[place - 1]):
            pass
        elif category[0] in "LN" or category == "Pc":
            alone = _written_without_spaces(character)
            if alone or kind != "letter":
                count += 1
            kind = "sign" if alone else "letter"
        elif not (kind == "letter" and _joins(text, place)):
            count += 1
            kind = "sign"
        words.append(count)
    return words


def _adds_to_the_last(category: str, character: str, last: str) -> bool:
    """Tell accents, vowel signs, skin colors, invisible characters, and what an invisible joiner ties to the last one."""
    return category[0] == "M" or category == "Cf" or "\U0001f3fb" <= character <= "\U0001f3ff" or last == "\u200d"


def _joins(text: str, place: int) -> bool:
    before, after = text[place - 1], text[place + 1 : place + 2]
    if text[place] in "'\u2019":
        return before.isalpha() and after.isalpha()
    return text[place] in ".," and before.isdigit() and after.isdigit()


def _written_without_spaces(character: str) -> bool:
    if character < "\u0e00":
        return False
    name = unicodedata.name(character, "")
    return name.startswith(("CJK ", "HIRAGANA ", "KATAKANA ", "THAI ", "LAO ", "KHMER ", "MYANMAR "))


def _letters(data: bytes) -> tuple[str, list[int]]:
    """Decode bytes, those that are no whole letter one by one.

    Returns:
        The text, and the place in it of every byte, then its length.
    """
    letters: list[str] = []
    places: list[int] = []
    start = 0
    while start < len(data):
        letter, length = "\ufffd", 1
        for size in range(1, 5):
            with contextlib.suppress(UnicodeDecodeError):
                letter, length = data[start : start + size].decode("utf-8"), size
                break
        length = min(length, len(data) - start)
        places += [len(letters)] * length
        letters.append(letter)
        start += length
    return "".join(letters), [*places, len(letters)]
