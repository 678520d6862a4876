"""A report as plain values, and back from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gradreg.attribution.similarity._advice import recommendation, reduction
from gradreg.attribution.similarity._findings import Findings
from gradreg.attribution.similarity._rows import Candidate, Divergence


def plain(report: Findings) -> dict[str, Any]:
    calibration = report.calibration
    return {
        "cosine": report.cosine,
        "dot": report.dot,
        "norm_a": report.norm_a,
        "norm_b": report.norm_b,
        "tokens_a": [asdict(token) for token in report.tokens_a],
        "tokens_b": [asdict(token) for token in report.tokens_b],
        "token_pairs": report.token_pairs.tolist(),
        "groups": [asdict(group) for group in report.groups],
        "what_ifs": {name: asdict(found) for name, found in report.what_ifs.items()},
        "divergence": None if report.divergence is None else asdict(report.divergence),
        "calibration": None
        if calibration is None
        else {
            "count": calibration.count,
            "percentile": finite(calibration.percentile),
            "rank": dict(calibration.rank),
            **{
                part: {
                    key: finite(dict(enumerate(values.tolist()))) for key, values in getattr(calibration, part).items()
                }
                for part in ("with_a", "with_b", "among")
            },
        },
        "reduction": reduction(report),
        "recommendation": recommendation(report),
        "notes": list(report.notes),
        "provenance": dict(report.provenance),
    }


def finite(values: Mapping[Any, float]) -> Any:
    """Return the values with None for NaN, which JSON does not have; numbered ones as a list."""
    found = {key: None if math.isnan(value) else value for key, value in values.items()}
    return list(found.values()) if all(isinstance(key, int) for key in found) else found


def divergence_from(values: Mapping[str, Any] | None) -> Divergence | None:
    if values is None:
        return None
    sides = {side: tuple(Candidate(**one) for one in values[side]) for side in ("in_a", "in_b")}
    return Divergence(values["index"], values["text_a"], values["text_b"], **sides)
