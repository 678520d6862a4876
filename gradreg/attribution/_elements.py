"""What pages of attributions and reports are made of; `web` has the frame around it."""

from __future__ import annotations

import importlib.resources
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gradreg.attribution.web import escaped

__all__ = [
    "STRENGTH",
    "STYLE",
    "Cell",
    "facts",
    "fixed",
    "number",
    "provenance",
    "script",
    "section",
    "table",
    "tokens",
    "visible",
]

STRENGTH = 70
"""Percent of the fill at the largest number: text on it can still be read, in light and dark."""


class Cell(NamedTuple):
    """A number in a table.

    Args:
        text: What is read.
        shade: From -1 to 1: how far it is shaded, and to which side; None for not at all.
        tooltip: What else is known.
    """

    text: str
    shade: float | None = None
    tooltip: str = ""


Row = tuple[str, Sequence[str | Cell]]
"""The name of a row, and its cells."""


def number(value: float | None, digits: int = 3, *, signed: bool = False) -> str:
    r"""Return a number as it is read; None as a dash.

    Example:
        >>> from gradreg.attribution._elements import number
        >>> ascii(number(-2e-9)), number(0.12345), number(0.5, signed=True), number(None), number(float("nan"))
        ("'\\u22122e\\u221209'", '0.123', '+0.5', '-', 'not a number')
    """
    if value is None:
        return "-"
    if math.isnan(value):
        return "not a number"
    return f"{value:{'+' if signed and value else ''}.{digits}g}".replace("-", "\u2212").replace("e+", "e")


def fixed(value: float | None, form: str) -> str:
    """Return a number in a form such as `"+.3f"` or `".1%"`, with a real minus; None as a dash."""
    return "-" if value is None else format(value, form).replace("-", "\u2212")


# Letters without a shape of their own: control letters, and marks that turn the direction of all that follows; as in _page.js
_HIDDEN = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


def visible(label: str) -> str:
    """Return a token as it is shown: white space alone becomes a sign, letters that cannot be seen their code."""
    shown = _HIDDEN.sub(lambda letter: f"⟨{ord(letter.group()):04X}⟩", label.strip())
    return shown or label.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"


def tokens(items: Iterable[tuple[str, float, str]]) -> str:
    """Return a line of tokens, each with its shade from -1 to 1 and its tooltip."""
    spans = []
    for label, shade, tooltip in items:
        kind, style = _shaded(shade)
        apart = " apart" if label[:1].isspace() else ""
        spans.append(
            f'<span class="token{kind}{apart}"{style} title="{escaped(tooltip)}">{escaped(visible(label))}</span>&#8203;'
        )
    return f'<p class="tokens">{"".join(spans)}</p>\n'


def table(name: str, columns: Sequence[str], rows: Iterable[Row], kind: str = "") -> str:
    """Return a table that scrolls by itself, also by keyboard, and never the page.

    Args:
        name: For those who do not see it.
        columns: Names, that of the names of rows first.
        rows: Names of rows, and their cells: numbers as `Cell`, texts as they are.
        kind: Class of the table.
    """
    rows = list(rows)
    kinds = [' class="number"' if isinstance(cell, Cell) else "" for cell in rows[0][1]] if rows else []
    head = "".join(
        f'<th scope="col"{own}>{escaped(column)}</th>'
        for column, own in itertools.zip_longest(columns, ["", *kinds], fillvalue="")
    )
    body = "\n".join(
        f'<tr><th scope="row">{escaped(label)}</th>{"".join(map(_cell, cells))}</tr>' for label, cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escaped(name)}"><table class="{kind}">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n"
    )


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escaped(cell)}</td>"
    kind, style = _shaded(cell.shade)
    tooltip = f' title="{escaped(cell.tooltip)}"' if cell.tooltip else ""
    return f'<td class="number{kind}"{style}{tooltip}>{escaped(cell.text)}</td>'


def _shaded(shade: float | None) -> tuple[str, str]:
    if shade is None or shade == 0:
        return "", ""
    if not math.isfinite(shade):
        return " unknown", ""
    return f" {'for' if shade > 0 else 'against'}", f' style="--strength:{STRENGTH * abs(shade):.1f}%"'


def section(identity: str, title: str, *parts: str) -> str:
    """Return a part of the page under a heading of its own."""
    return (
        f'<section aria-labelledby="{identity}"><h2 id="{identity}">{escaped(title)}</h2>\n{"".join(parts)}</section>\n'
    )


def facts(known: Iterable[tuple[str, str]]) -> str:
    """Return names and values side by side."""
    pairs = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in known)
    return f"<dl>{pairs}</dl>\n"


def provenance(known: Mapping[str, Any]) -> str:
    """Return what made the numbers, folded away at the end."""
    rows = "".join(
        f'<tr><th scope="row">{escaped(name)}</th>'
        f"<td>{escaped(value if isinstance(value, str) else json.dumps(value, default=str))}</td></tr>"
        for name, value in known.items()
    )
    return (
        "<footer><details><summary>What made these numbers</summary>"
        '<div class="scroll" tabindex="0" role="group" aria-label="What made these numbers">'
        f"<table>{rows}</table></div></details></footer>\n"
    )


def script(name: str, package: str = "gradreg.attribution") -> str:
    """Return a script of this package, after what all of them share."""
    files = (("gradreg.attribution", "_common.js"), (package, name))
    return "".join((importlib.resources.files(own) / file).read_text(encoding="utf-8") for own, file in files)


STYLE = """
.control { align-items: baseline; border: 0; display: flex; flex-wrap: wrap; gap: .25rem .75rem; margin: .5rem 0;
  min-width: 0; padding: 0; }
.control label, legend { color: var(--soft); padding: 0; }
.control legend { float: left; }
select { background: var(--paper); border: 1px solid var(--soft); border-radius: .3rem; color: var(--ink); font: inherit;
  max-width: 100%; padding: .25rem; }
h3 { color: var(--soft); font-size: 1rem; font-weight: 400; margin: .5rem 0 .25rem; }
.tokens { line-height: 2; margin: 0 0 .75rem; overflow-wrap: anywhere; }
.tokens .token { margin: 0 .1rem; padding: .15rem .2rem; }
.tokens .apart { margin-left: .35rem; }
.unknown { outline: 2px dotted var(--soft); }
.scroll { max-width: 100%; overflow-x: auto; }
.scroll:focus-visible { outline: 3px solid var(--for); outline-offset: 1px; }
.scroll td { overflow-wrap: anywhere; }
.number, dd { font-variant-numeric: tabular-nums; }
td.for { background: color-mix(in srgb, var(--for-fill) var(--strength), transparent); }
td.against { background: color-mix(in srgb, var(--against-fill) var(--strength), transparent); }
.numbers th, .numbers td { max-width: 24rem; min-width: 6rem; overflow-wrap: break-word; padding: .1rem .5rem;
  vertical-align: top; }
.numbers .number { min-width: 3.5rem; text-align: right; }
.numbers td.number { white-space: nowrap; }
.numbers th { color: var(--soft); font-weight: 400; max-width: 12rem; }
.numbers th:first-child { background: var(--paper); left: 0; min-width: 5rem; padding-left: 0; position: sticky; }
.numbers th[scope=row] { color: var(--ink); }
@media (max-width: 30rem) { .numbers th { max-width: 7rem; } .numbers td { max-width: 14rem; } }
summary { cursor: pointer; padding: .25rem 0; }
footer { border-top: 1px solid var(--line); margin-top: 1rem; padding-top: .5rem; }
"""
