"""Texts to look at: pairs of sentences from Python's own reference, or lines of a file."""

from __future__ import annotations

import re
from pathlib import Path

from gradreg.errors import GradregError

__all__ = ["neighbors", "read_lines"]

_PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,.;()'\u2019-]+\.")
_END = re.compile(r"(?<=[.]) (?=[A-Z])")
_WORDS = range(6, 19)


def neighbors(count: int) -> list[str]:
    """Return pairs of sentences that follow each other in the Python reference, one pair a topic; pairs stand together.

    Args:
        count: How many sentences.

    Raises:
        GradregError: If there are not so many.
    """
    from pydoc_data.topics import topics

    found: list[str] = []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            text = " ".join(paragraph.split())
            sentences = _END.split(text)
            if _PROSE.fullmatch(text) and len(sentences) > 1 and all(len(one.split()) in _WORDS for one in sentences):
                found += sentences[:2]
                break
    if len(found) < count:
        raise GradregError(f"count: there are {len(found)} such sentences, not {count}; give a file, text=...")
    return found[:count]


def read_lines(path: str | Path, count: int | None) -> list[tuple[str, ...]]:
    """Return the lines of a text file that are not empty, each split at its tabs.

    Args:
        path: Of a file in UTF-8.
        count: How many lines at most; None for all.

    Raises:
        GradregError: If it cannot be read or is empty.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise GradregError(f"text: {path} cannot be read ({problem}).") from problem
    found = [tuple(part.strip() for part in line.split("\t")) for line in lines if line.strip()]
    if not found:
        raise GradregError(f"text: {path} holds no text.")
    return found[:count]
