"""The page of an attribution: its numbers, packed, and the controls that `_page.js` brings to life."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gradreg.attribution._check import EXAMPLE
from gradreg.attribution._elements import STYLE, provenance, script
from gradreg.attribution._fields import Fields
from gradreg.attribution._look import TOKEN, as_text, is_real, one_axis, shown_labels, target_names
from gradreg.attribution.web import document, escaped
from gradreg.errors import GradregError

__all__ = ["page"]

MOST_SCORES = 4_000_000
"""About 11 MB of page."""

MOST_EXAMPLES = 200


def page(a: Fields, title: str | None, examples: Sequence[str] | None) -> str:
    """Write the page; see `Attribution.to_html`."""
    one_axis(a)
    first = next(iter(a.by_key.values()))
    n = first.shape[0]
    count = sum(value.numel() for value in a.by_key.values())
    if count > MOST_SCORES or n > MOST_EXAMPLES:
        axes = ", ".join(f"{axis} {size}" for axis, size in zip((EXAMPLE, *a.target_axes), first.shape, strict=False))
        raise GradregError(
            f"There are {count} scores of {n} examples ({axes}); a page shows up to {MOST_SCORES} of {MOST_EXAMPLES}. "
            "Take part of them first: .select('example', [0, 1]), .select('class', [...])."
        )
    if examples is not None and len(examples) != n:
        raise GradregError(f"examples has {len(examples)} names; there are {n} examples.")
    names = [escaped(one) for one in examples or [f"Example {one}" for one in range(n)]]
    heading = title if title is not None else a.method.replace("_", " ").capitalize()
    data = {"axes": list(a.target_axes), "token": TOKEN, "examples": [_record(a, one) for one in range(n)]}
    sections = "".join(
        f'<section id="example-{one}" aria-labelledby="title-{one}" tabindex="-1">\n'
        f'<h2 id="title-{one}">{names[one]}</h2>\n</section>\n'
        for one in range(n)
    )
    links = "".join(f'<li><a href="#example-{one}">{names[one]}</a></li>' for one in range(n))
    single = "" if first.shape[1 : 1 + len(a.target_axes)].numel() > 1 else " hidden"
    nav = f'<nav aria-label="Examples"><ul>{links}</ul></nav>\n' if n > 1 else ""
    body = (
        f'<a class="skip" href="#examples">Skip to the examples</a>\n<header><h1>{escaped(heading)}</h1>\n'
        f"<p>{escaped(as_text(a))}</p>\n<p>{_LEGEND}</p>\n"
        f"<p{single}>"
        '<label class="box"><input type="checkbox" id="common"> One scale of shades for all targets of an example'
        "</label></p></header>\n"
        f"{nav}<noscript><p>Scores are shown by a script in this file, which is switched off.</p></noscript>\n"
        '<main id="examples">\n'
        f"{sections}</main>\n{provenance({'method': a.method, 'per': a.per, **a.provenance})}"
    )
    return document(heading, body, style=STYLE + _STYLE, script=script("_page.js"), data=data)


def _record(a: Fields, example: int) -> dict[str, Any]:
    """Return what the script needs of one example; padded positions and targets are left out."""
    names = [target_names(a, axis, example) for axis in range(len(a.target_axes))]
    places = [[place for place, name in enumerate(own) if name is not None] for own in names]
    keys, parts = [], []
    for key, scores in a.by_key.items():
        own = _numpy(scores[example])[np.ix_(*places)] if places else _numpy(scores[example])
        labels = shown_labels(a, key, example)
        kept = _real(a, key, example)
        parts.append(own.reshape(-1, own.shape[-1])[:, kept])
        segment = a.segments.get(key, "")
        name = segment[:1].upper() + segment[1:] if segment else "Scores"
        name += f" ({key})" if len(a.by_key) > 1 and list(a.segments.values()).count(segment) != 1 else ""
        keys.append({"name": name, "labels": [labels[place] for place in kept]})
    table = np.concatenate(parts, -1)
    largest = np.abs(np.where(np.isfinite(table), table, 0)).max(-1, initial=0)
    with np.errstate(over="ignore", invalid="ignore"):
        shares = table / np.where(largest > 0, largest, 1)[:, None]
    return {
        "keys": keys,
        "targets": [[{"at": place, "label": names[axis][place]} for place in kept] for axis, kept in enumerate(places)],
        "scores": _base64(shares, "<f2"),
        "scales": _base64(largest, "<f4"),
        "numbers": _numbers(a, example, places),
    }


def _numbers(a: Fields, example: int, places: list[list[int]]) -> list[dict[str, Any]]:
    """Return what is known of every target: its name, its values, and by its place what it is a share of."""
    known = [
        ("Sum of scores", a.total, False, None),
        ("Change of the target", a.change, False, None),
        ("Gap between the two", a.delta, False, 1 if a.change is not None else None),
        ("Estimated error", a.error, True, 1 if a.change is not None else None),
    ]
    rows = []
    for name, value, magnitude, of in known:
        if value is not None:
            own = _numpy(value[example])
            packed = _base64(own[np.ix_(*places)] if places else own, "<f4")
            rows.append({"name": name, "values": packed, "magnitude": magnitude, "of": of})
    return rows


def _real(a: Fields, key: str, example: int) -> list[int]:
    return [n for n in range(a.by_key[key].shape[-1]) if is_real(a, key, example, n)]


def _numpy(value: Tensor) -> Any:
    return value.detach().double().cpu().numpy()


def _base64(values: Any, kind: str) -> str:
    with np.errstate(over="ignore"):
        return base64.b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode()


_LEGEND = (
    'Tokens are shaded by their score: <span class="token for" style="--strength:60%">underlined, blue</span> above zero, '
    '<span class="token against" style="--strength:60%">dashed, orange</span> below. A token\'s tooltip, and the table, '
    "give the number."
)

_STYLE = """
.choices { display: flex; flex: 1 1 16rem; flex-wrap: wrap; gap: .25rem; max-height: 12rem; min-width: 0;
  overflow-y: auto; padding: 3px; position: relative; }
.choice { position: relative; max-width: 100%; }
.choice input { cursor: pointer; height: 100%; inset: 0; margin: 0; opacity: 0; position: absolute; width: 100%; }
.choice span { border: 1px solid var(--line); border-radius: .3rem; color: var(--ink); display: block; min-width: 1.75rem;
  overflow-wrap: anywhere; padding: .1rem .4rem; text-align: center; }
.choice input:checked + span { background: var(--ink); border-color: var(--ink); color: var(--paper); }
.choice input:focus-visible + span, .box input:focus-visible { outline: 3px solid var(--for);
  outline-offset: 1px; }
.status { font-weight: 600; margin: .75rem 0 .25rem; }
.token.unknown { outline: 2px dotted var(--soft); }
"""
