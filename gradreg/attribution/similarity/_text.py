"""The report as a table for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import torch

from gradreg.attribution.similarity._advice import recommendation, reduction
from gradreg.attribution.similarity._calibration import AS_GIVEN
from gradreg.attribution.similarity._findings import Findings
from gradreg.attribution.similarity._rows import TokenRow
from gradreg.attribution.similarity._texts import shown

_WIDTH = 88
_TOKENS = 12  # rows per example; the largest shares are kept
_MATRIX = 7  # more tokens than this: the strongest pairs as a list
_PAIRS = 8
_GROUPS = 14


def as_text(report: Findings) -> str:
    about = report.provenance
    lines = [
        f"Gradient cosine {report.cosine:.4f}   dot {report.dot:.4g}   |a| {report.norm_a:.4g}   |b| {report.norm_b:.4g}",
        *_wrapped(f"{about.get('model', '')}, {about.get('dtype', '')}, attention {about.get('attention', '')}"),
    ]
    lines += ["", *_tokens("a", report.tokens_a), "", *_tokens("b", report.tokens_b)]
    if report.token_pairs.numel() > 1:
        lines += ["", *_pairs(report)]
    lines += ["", *_what_ifs(report), "", *_groups(report)]
    if report.divergence is not None:
        lines += ["", *_divergence(report)]
    if report.calibration is not None:
        lines += ["", *_calibration(report)]
    lines += ["", *_wrapped(reduction(report)), *(line for note in report.notes for line in _wrapped(f"Note: {note}"))]
    return "\n".join([*lines, "", *_wrapped(f"Recommendation: {recommendation(report)}")])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ")


def _table(rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Align columns; the first `texts` to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i < texts else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _tokens(name: str, tokens: Sequence[TokenRow]) -> list[str]:
    kept = sorted(range(len(tokens)), key=lambda i: -abs(tokens[i].share))[:_TOKENS]
    rows = [[f"tokens of {name}", "loss", "|g|", "share of |G|²", ""]]
    for i in sorted(kept):
        token = tokens[i]
        marks = [word for word, flag in (("prompt", token.prompt), ("new", token.new), ("end", token.end)) if flag]
        if token.special and not token.end:
            marks.append("special")
        rows.append(
            [
                f"  {_short(shown(token.text), 24)}",
                f"{token.loss:.4g}",
                f"{token.norm:.4g}",
                f"{token.share:.1%}",
                " ".join(marks),
            ]
        )
    lines = _table([row[:4] for row in rows])
    lines = [f"{line}  {row[4]}".rstrip() for line, row in zip(lines, rows, strict=True)]
    left = len(tokens) - len(kept)
    return lines if not left else [*lines, f"  and {left} more with smaller shares"]


def _pairs(report: Findings) -> list[str]:
    pairs = report.token_pairs
    title = "pairs of tokens (sum: the cosine)"
    names_a = [_short(shown(token.text), 12) for token in report.tokens_a]
    names_b = [_short(shown(token.text), 8) for token in report.tokens_b]
    if max(pairs.shape) <= _MATRIX:
        rows = [[title if not names_a else "a \\ b", *names_b]]
        rows += [
            [f"  {name}", *(f"{value:+.3f}" for value in row)]
            for name, row in zip(names_a, pairs.tolist(), strict=True)
        ]
        return [title, *_table(rows)]
    order = pairs.flatten().abs().argsort(descending=True, stable=True)[:_PAIRS].tolist()
    rows = []
    for place in order:
        i, j = divmod(place, pairs.shape[1])
        rows.append([f"  {names_a[i]} [{i}]", f"{names_b[j]} [{j}]", f"{float(pairs[i, j]):+.3f}"])
    shown_sum = float(pairs.flatten()[order].sum())
    rest = f"  all other {pairs.numel() - len(order)} pairs together {float(pairs.sum()) - shown_sum:+.3f}"
    return [f"strongest {title}", *_table(rows, texts=2), rest]


def _what_ifs(report: Findings) -> list[str]:
    rows = [["what if", "cosine", "dot", ""]]
    for name, found in report.what_ifs.items():
        dropped = [
            f"{side}: {' '.join(texts)}" for side, texts in (("a", found.dropped_a), ("b", found.dropped_b)) if texts
        ]
        cosine = "-" if found.cosine is None else f"{found.cosine:.4f}"
        rows.append([f"  {name}", cosine, f"{found.dot:.4g}", _short("; ".join(dropped), 30)])
    lines = _table([row[:3] for row in rows])
    return [f"{line}  {row[3]}".rstrip() for line, row in zip(lines, rows, strict=True)]


def _groups(report: Findings) -> list[str]:
    order = sorted(report.groups, key=lambda group: -(group.share_a + group.share_b))
    rows = [["parameters", "numbers", "share a", "share b", "cosine", "adds"]]
    for group in order[:_GROUPS]:
        cosine = "-" if group.cosine is None else f"{group.cosine:.3f}"
        rows.append(
            [
                f"  {_short(group.name, 36)}",
                f"{group.numel:,}",
                f"{group.share_a:.1%}",
                f"{group.share_b:.1%}",
                cosine,
                f"{group.contribution:+.3f}",
            ]
        )
    lines = _table(rows)
    rest = order[_GROUPS:]
    if rest:
        lines.append(f"  and {len(rest)} smaller groups, which add {sum(group.contribution for group in rest):+.3f}")
    return lines


def _divergence(report: Findings) -> list[str]:
    found = report.divergence
    assert found is not None
    lines = [f"first difference: target {found.index + 1}"]
    for side, candidates in (("a", found.in_a), ("b", found.in_b)):
        if candidates:
            told = ", ".join(f"{shown(one.text)} loss {one.loss:.3g} rank {one.rank:,}" for one in candidates)
            lines += _wrapped(f"  {side} there expects: {told}")
        else:
            lines.append(f"  {side} has ended")
    return lines


def _calibration(report: Findings) -> list[str]:
    calibration = report.calibration
    assert calibration is not None
    rows = [[f"calibration, {calibration.count} others", "cosine", "higher than", "b by cosine with a", "median pair"]]
    for key, percentile in calibration.percentile.items():
        own = report.what_ifs[key].cosine
        reference = calibration.reference(key)
        middle = f"{float(torch.quantile(reference, 0.5)):.3f}" if len(reference) else "-"
        standing = "-" if own is None or percentile != percentile else f"{percentile:.0f} % of pairs"
        rank = f"{calibration.rank[key]} of {calibration.count + 1}" if calibration.rank[key] else "-"
        rows.append([f"  {key}", "-" if own is None else f"{own:.4f}", standing, rank, middle])
    assert AS_GIVEN in calibration.percentile
    return _table(rows)
