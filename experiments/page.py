"""One HTML file that shows test examples beside their proponents and opponents; it needs no server and no network."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gradreg.attribution.web import document, escaped

__all__ = ["Card", "Image", "Question", "Text", "page", "png"]


@dataclass(frozen=True)
class Image:
    """A picture: `[height, width]` or `[height, width, 3]`, numbers of any range, scaled to their own."""

    pixels: np.ndarray


@dataclass(frozen=True)
class Text:
    """Tokens, shaded by scores if there are any: one score per token, None for those without."""

    tokens: Sequence[str]
    scores: Sequence[float | None] = ()


@dataclass(frozen=True)
class Card:
    """One example: where it lies, what it is, and its score."""

    title: str
    shown: Image | Text
    label: str = ""
    score: float | None = None


@dataclass(frozen=True)
class Question:
    """A test example and what answers it."""

    test: Card
    proponents: Sequence[Card] = field(default_factory=tuple)
    opponents: Sequence[Card] = field(default_factory=tuple)


def page(title: str, questions: Sequence[Question], facts: Sequence[tuple[str, str]] = ()) -> str:
    """Write the page.

    Args:
        title: Of the page.
        questions: In their order.
        facts: Names and values shown at the top.

    Returns:
        HTML, everything from users escaped.
    """
    shown = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts)
    links = "".join(f'<li><a href="#q{n}">{escaped(q.test.title)}</a></li>' for n, q in enumerate(questions))
    body = "".join(_question(number, question) for number, question in enumerate(questions))
    return document(
        title,
        f'<a class="skip" href="#questions">Skip to the examples</a>\n<header><h1>{escaped(title)}</h1>\n<dl>{shown}</dl>\n'
        f"<p>{_LEGEND}</p></header>\n"
        f'<nav aria-label="Test examples"><ul>{links}</ul></nav>\n<main id="questions">\n{body}</main>\n',
        style=_STYLE,
    )


_LEGEND = (
    "A proponent lowered the loss of the test example when it was trained on, an opponent raised it. Tokens are shaded by "
    "their share of the score: "
    '<span class="token for" style="--strength:60%">underlined, blue</span> for, '
    '<span class="token against" style="--strength:60%">dashed, orange</span> against.'
)


def _question(number: int, question: Question) -> str:
    return (
        f'<section id="q{number}" aria-labelledby="h{number}" tabindex="-1">\n<h2 id="h{number}">'
        f"{escaped(question.test.title)}</h2>\n"
        f'<div class="row"><div class="test"><h3>Test example</h3>{_card(question.test, "test")}</div>'
        f"<div><h3>Proponents</h3>{_cards(question.proponents, 'for')}</div>"
        f"<div><h3>Opponents</h3>{_cards(question.opponents, 'against')}</div></div>\n"
        '<p><a href="#questions">Back to the first</a></p>\n</section>\n'
    )


def _cards(cards: Sequence[Card], kind: str) -> str:
    if not cards:
        return "<p>None.</p>"
    return "<ol>" + "".join(f"<li>{_card(card, kind)}</li>" for card in cards) + "</ol>"


def _card(card: Card, kind: str) -> str:
    score = "" if card.score is None else f'<p class="score">{card.score:+.4g}</p>'
    label = f'<p class="label">{escaped(card.label)}</p>' if card.label else ""
    alternative = f"{card.title}, {card.label}".rstrip(", ")
    if isinstance(card.shown, Image):
        data = base64.b64encode(png(card.shown.pixels)).decode()
        shown = f'<img alt="{escaped(alternative)}" src="data:image/png;base64,{data}">'
    else:
        shown = _tokens(card.shown)
    return f'<article class="card {kind}">{shown}<p class="title">{escaped(card.title)}</p>{label}{score}</article>'


def _tokens(text: Text) -> str:
    if not text.scores:
        return f'<p class="tokens">{" ".join(escaped(token) for token in text.tokens)}</p>'
    known = [abs(score) for score in text.scores if score is not None]
    largest = max(known, default=0.0) or 1.0
    pieces, rows = [], []
    for token, score in zip(text.tokens, text.scores, strict=True):
        if score is None:
            pieces.append(escaped(token))
            continue
        kind = "for" if score >= 0 else "against"
        strength = round(70 * abs(score) / largest)
        pieces.append(
            f'<span class="token {kind}" style="--strength:{strength}%" title="{score:+.4g}">{escaped(token)}</span>'
        )
        rows.append(f"<tr><td>{escaped(token)}</td><td>{score:+.4g}</td></tr>")
    table = "".join(rows)
    return (
        f'<p class="tokens">{" ".join(pieces)}</p><details><summary>Scores of the tokens</summary><table><thead><tr>'
        f'<th scope="col">token</th><th scope="col">score</th></tr></thead><tbody>{table}</tbody></table></details>'
    )


def png(pixels: np.ndarray) -> bytes:
    """Return a picture as a PNG file, its values scaled from least to greatest.

    Args:
        pixels: `[height, width]` or `[height, width, 3]`.

    Raises:
        ValueError: If the shape is another.
    """
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise ValueError(
            f"pixels have the shape {list(pixels.shape)}; allowed are [height, width] and [height, width, 3]."
        )
    values = np.nan_to_num(pixels.astype(np.float64))
    low, high = float(values.min()), float(values.max())
    scaled = np.round(255 * (values - low) / (high - low or 1.0)).astype(np.uint8)
    height, width = scaled.shape[:2]
    lines = b"".join(b"\x00" + scaled[row].tobytes() for row in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if scaled.ndim == 2 else 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


_STYLE = """
.row { display: grid; gap: 1.5rem; grid-template-columns: minmax(10rem, 1fr) 2fr 2fr; }
@media (max-width: 50rem) { .row { grid-template-columns: 1fr; } }
ol { display: flex; flex-wrap: wrap; gap: .75rem; list-style: none; margin: 0; padding: 0; }
li { min-width: 0; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem; }
.card.for { border-left: 4px solid var(--for); } .card.against { border-left: 4px dashed var(--against); }
.card p { margin: .25rem 0 0; overflow-wrap: anywhere; }
.card img { height: 6rem; image-rendering: pixelated; max-width: 100%; width: auto; }
.score { font-variant-numeric: tabular-nums; font-weight: 600; }
"""
