"""The report as a page: its numbers, packed, for `_page.js` to show."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradreg.attribution._elements import STYLE, facts, provenance, script
from gradreg.attribution.attention._plot import LABELS, SIGNED
from gradreg.attribution.attention._side import AttentionSide
from gradreg.attribution.attention._statistics import QUANTITIES
from gradreg.attribution.web import document, escaped
from gradreg.errors import GradregError

__all__ = ["page"]

_MOST_NUMBERS = 1_000_000
"""About 11 MB of page."""


def page(sides: Mapping[str, AttentionSide], about: Mapping[str, Any], title: str | None) -> str:
    """Write the page; see `AttentionReport.to_html`."""
    count = sum(value.numel() for side in sides.values() for value in side.table.values())
    targets = list(about["targets"])
    if count > _MOST_NUMBERS:
        raise GradregError(
            f"There are {count} numbers of {math.prod(targets)} targets; a page shows up to {_MOST_NUMBERS}. Take one of "
            "them first: .target(0)."
        )
    heading = "Attention and its gradients" if title is None else title
    summed = "" if about["per"] == "example" else ", summed over the batch"
    known = [("Model", about["model"]), ("Examples", about["examples"]), ("Gradients of", f"{about['of']}{summed}")]
    names = {name for side in sides.values() for name in QUANTITIES if name in side.table}
    data = {
        "sides": [_record(side) for side in sides.values()],
        "targets": targets,
        "labels": {name: LABELS[name] for name in sorted(names)},
        "signed": sorted(names & SIGNED),
    }
    body = (
        f'<a class="skip" href="#report">Skip to the report</a>\n<header><h1>{escaped(heading)}</h1>\n{facts(known)}'
        f"<p>{_LEGEND}</p></header>\n"
        "<noscript><p>Numbers are shown by a script in this file, which is switched off.</p></noscript>\n"
        f'<main id="report" tabindex="-1"></main>\n{provenance(about["provenance"])}'
    )
    own = script("_page.js", "gradreg.attribution.attention")
    return document(heading, body, style=STYLE + _STYLE, script=own, data=data)


def _record(side: AttentionSide) -> dict[str, Any]:
    """Return what the script needs of the maps of one sort."""
    return {
        "name": side.name,
        "layers": list(side.layers),
        "maps": list(side.maps),
        "heads": side.queries.shape[1],
        "kinds": list(side.kinds),
        "absent": list(side.absent),
        "pairs": _base64(side.pairs),
        "queries": _base64(side.queries),
        "table": {name: _base64(side.table[name]) for name in QUANTITIES if name in side.table},
    }


def _base64(values: Tensor) -> str:
    numbers = values.detach().to("cpu", torch.float64).numpy()
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<f8").tobytes()).decode()


_LEGEND = (
    "Cells are shaded by their number, the largest of all kinds darkest; the sign tells what is below zero. A cell's tooltip "
    "has three digits and how many pairs of query and key the mean goes over; a dash stands where there is none."
)

_STYLE = """
.heads th, .heads td { min-width: 2.6rem; padding: .05rem .3rem; }
.heads th:first-child { min-width: 4rem; }
.heads .mean { border-left: 3px solid var(--paper); font-weight: 600; }
.status { font-weight: 600; margin: .75rem 0 .25rem; }
.kinds { display: flex; flex-wrap: wrap; gap: 0 2rem; }
.kinds > section { border: 0; flex: 0 1 auto; max-width: 100%; min-width: 0; }
.kinds h3 { color: var(--ink); font-weight: 600; }
figure { margin: .5rem 0; }
figcaption, .legend { color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; margin: .25rem 0; padding: 0; }
.legend svg { height: .8rem; vertical-align: middle; width: .8rem; }
.chart { height: auto; max-width: none; }
.chart text { fill: var(--soft); font-size: 12px; }
.chart .grid { stroke: var(--line); }
.chart .dot { opacity: .5; }
.kind0 { --kind: #0072b2; } .kind1 { --kind: #d55e00; } .kind2 { --kind: #009e73; } .kind3 { --kind: #8a8a8a; }
.kind4 { --kind: #cc79a7; } .kind5 { --kind: #b27c00; } .kind6 { --kind: #2f9bd0; } .kind7 { --kind: currentcolor; }
@media (prefers-color-scheme: dark) { .kind0 { --kind: #4aa3df; } .kind1 { --kind: #ff8534; } .kind2 { --kind: #2fc39a; }
  .kind3 { --kind: #a8a8a8; } .kind5 { --kind: #e69f00; } .kind6 { --kind: #56b4e9; } }
.mark { fill: var(--kind); } .line { fill: none; stroke: var(--kind); stroke-width: 1.75; }
"""
