"""The report as a page: nothing to choose, so no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gradreg.attribution._elements import (
    STYLE,
    Cell,
    Row,
    facts,
    fixed,
    number,
    provenance,
    section,
    table,
    tokens,
    visible,
)
from gradreg.attribution.similarity._advice import recommendation, reduction
from gradreg.attribution.similarity._findings import Findings
from gradreg.attribution.similarity._pairs import strongest_pairs
from gradreg.attribution.similarity._rows import TokenRow
from gradreg.attribution.web import document, escaped
from gradreg.errors import GradregError

__all__ = ["page"]

_MOST_TOKENS = 80  # a side of the matrix


def page(report: Findings, title: str | None, examples: Sequence[str] | None) -> str:
    """Write the page; see `SimilarityReport.to_html`."""
    if examples is not None and (isinstance(examples, str) or len(examples) != 2):
        raise GradregError(f"examples={examples!r} has to be two names, of a and of b.")
    named = [f"{side}: {name}" for side, name in zip("ab", examples, strict=True)] if examples else ["a", "b"]
    heading = "Why two gradients differ" if title is None else title
    known = [
        ("Cosine", number(report.cosine, 4)),
        ("Dot product", number(report.dot, 4)),
        ("Norm of a", number(report.norm_a, 4)),
        ("Norm of b", number(report.norm_b, 4)),
    ]
    notes = "".join(f"<li>{escaped(note)}</li>" for note in report.notes)
    parts = [
        section("advice", "Recommendation", f"<p>{escaped(recommendation(report))}</p>\n"),
        _tokens(report, named),
        _pairs(report) if report.token_pairs.numel() > 1 else "",
        _what_ifs(report),
        _groups(report),
        _divergence(report),
        _calibration(report),
        section("reduction", "Sum or mean", f"<p>{escaped(reduction(report))}</p>\n"),
        section("notes", "Notes", f"<ul>{notes}</ul>\n") if notes else "",
    ]
    body = (
        f'<a class="skip" href="#report">Skip to the report</a>\n<header><h1>{escaped(heading)}</h1>\n{facts(known)}'
        f"<p>{_LEGEND}</p></header>\n"
        f'<main id="report" tabindex="-1">\n{"".join(parts)}</main>\n{provenance(report.provenance)}'
    )
    return document(heading, body, style=STYLE)


_LEGEND = (
    "Tokens and cells are shaded by their number, the largest darkest: "
    '<span class="token for" style="--strength:60%">underlined, blue</span> above zero, '
    '<span class="token against" style="--strength:60%">dashed, orange</span> below; in tables the sign tells.'
)


def _largest(values: Iterable[float | None]) -> float:
    return max((abs(value) for value in values if value is not None and value == value), default=0.0) or 1.0


def _tokens(report: Findings, named: Sequence[str]) -> str:
    sides = (report.tokens_a, report.tokens_b)
    largest = _largest(token.share for side in sides for token in side)
    parts = [
        "<p>Shaded by the share of |G|², the squared norm of the gradient of the example; below zero a token pulls against "
        "the rest.</p>\n"
    ]
    for name, side in zip(named, sides, strict=True):
        line = tokens(
            (
                token.text,
                token.share / largest,
                f"{fixed(token.share, '.1%')} of |G|², loss {number(token.loss, 4)}, norm {number(token.norm, 4)}",
            )
            for token in side
        )
        rows: list[Row] = [
            (
                visible(token.text),
                [
                    Cell(str(token.position)),
                    Cell(number(token.loss, 4)),
                    Cell(number(token.norm, 4)),
                    Cell(fixed(token.share, ".1%"), token.share / largest),
                    ", ".join(_marks(token)),
                ],
            )
            for token in side
        ]
        columns = ("token", "position", "loss", "norm", "share of |G|²", "kind")
        folded = table(f"Tokens of {name}", columns, rows, "numbers")
        parts.append(
            f"<h3>{escaped(name)}</h3>\n{line}<details><summary>Tokens of {escaped(name)} as a table</summary>{folded}"
            "</details>\n"
        )
    return section("tokens", "Tokens", *parts)


def _marks(token: TokenRow) -> list[str]:
    known = {
        "prompt": token.prompt,
        "new": token.new,
        "end": token.end,
        "special": token.special and not token.end,
    }
    return [name for name, holds in known.items() if holds]


def _pairs(report: Findings) -> str:
    pairs = strongest_pairs(report, _MOST_TOKENS)
    values = pairs.values
    rows_named, columns_named = (
        [*(visible(side[place].text) for place in places), *(["all others"] if len(places) < len(side) else [])]
        for side, places in ((report.tokens_a, pairs.places_a), (report.tokens_b, pairs.places_b))
    )
    largest = _largest(values.flatten().tolist())
    rows: list[Row] = [
        (
            name,
            [
                *(
                    Cell(fixed(one, "+.3f"), one / largest, f"a {name}, b {other}: {number(one, 6, signed=True)}")
                    for one, other in zip(row, columns_named, strict=True)
                ),
                Cell(fixed(sum(row), "+.3f")),
            ],
        )
        for name, row in zip(rows_named, values.tolist(), strict=True)
    ]
    rows.append(
        ("sum", [*(Cell(fixed(one, "+.3f")) for one in values.sum(0).tolist()), Cell(fixed(report.cosine, "+.3f"))])
    )
    return section(
        "pairs",
        "Pairs of tokens",
        "<p>What each token of a (rows) and token of b (columns) add to the cosine together; all cells sum to it.</p>\n",
        table("Pairs of tokens", ("a \\ b", *columns_named, "sum"), rows, "numbers"),
    )


def _what_ifs(report: Findings) -> str:
    rows: list[Row] = []
    for name, found in report.what_ifs.items():
        left = [
            f"{side}: {' '.join(texts)}" for side, texts in (("a", found.dropped_a), ("b", found.dropped_b)) if texts
        ]
        cosine = Cell("nothing left" if found.cosine is None else fixed(found.cosine, ".4f"), found.cosine)
        rows.append((name, [cosine, Cell(number(found.dot, 4)), found.text, "; ".join(left)]))
    return section(
        "what-ifs",
        "What if",
        table("What if", ("change", "cosine", "dot product", "what is changed", "left out"), rows, "numbers"),
    )


def _groups(report: Findings) -> str:
    order = sorted(report.groups, key=lambda group: -(group.share_a + group.share_b))
    largest = _largest(group.contribution for group in order)
    rows = (
        (
            group.name,
            [
                Cell(f"{group.numel:,}"),
                Cell(fixed(group.share_a, ".1%"), group.share_a),
                Cell(fixed(group.share_b, ".1%"), group.share_b),
                Cell(fixed(group.cosine, "+.3f"), group.cosine),
                Cell(fixed(group.contribution, "+.3f"), group.contribution / largest),
            ],
        )
        for group in order
    )
    columns = ("group", "numbers", "share of |a|²", "share of |b|²", "cosine", "adds to the cosine")
    named = "".join(
        f'<tr><th scope="row">{escaped(group.name)}</th><td>{escaped(", ".join(group.parameters))}</td></tr>'
        for group in order
    )
    return section(
        "groups",
        "Groups of parameters",
        table("Groups of parameters", columns, rows, "numbers"),
        '<details><summary>Parameters of every group</summary><div class="scroll" tabindex="0" role="group" '
        f'aria-label="Parameters of every group"><table class="numbers">{named}</table></div></details>\n',
    )


def _divergence(report: Findings) -> str:
    found = report.divergence
    if found is None:
        return ""
    rows: list[Row] = [
        (visible(one.text), [side, Cell(number(one.loss)), Cell(f"{one.rank:,}")])
        for side, candidates in (("a", found.in_a), ("b", found.in_b))
        for one in candidates
    ]
    ended = [side for side, candidates in (("a", found.in_a), ("b", found.in_b)) if not candidates]
    return section(
        "divergence",
        "First difference",
        f"<p>The targets part at number {found.index + 1}. What the model makes of both targets there:</p>\n",
        table("First difference", ("target", "predicted in", "loss", "rank"), rows, "numbers") if rows else "",
        "".join(f"<p>{side} has ended, or its predictions are not known.</p>\n" for side in ended),
    )


def _calibration(report: Findings) -> str:
    calibration = report.calibration
    if calibration is None:
        return ""
    rows: list[Row] = []
    for key, percentile in calibration.percentile.items():
        own, reference, rank = report.what_ifs[key].cosine, calibration.reference(key), calibration.rank[key]
        middle = float(torch.quantile(reference, 0.5)) if len(reference) else None
        standing = "-" if own is None or percentile != percentile else f"{percentile:.0f} % of pairs"
        rows.append(
            (
                key,
                [
                    Cell(fixed(own, ".4f"), own),
                    Cell(standing),
                    Cell(f"{rank} of {calibration.count + 1}" if rank else "-"),
                    Cell(fixed(middle, "+.3f"), middle),
                ],
            )
        )
    columns = ("change", "cosine", "higher than", "place of b", "median pair")
    return section(
        "calibration",
        "Calibration",
        f"<p>Compared with the pairs that {calibration.count} other examples make; b is placed among "
        "them by its cosine with a.</p>\n",
        table("Calibration", columns, rows, "numbers"),
    )
