"""Write docs/regularizers.md: one row per regularizer, from its docstring, its attributes and what is measured.

    python -m gradreg.experiments.regularizer_page

Formula and source are read from the docstrings, `of`, `wrt` and order from the objects. "ReLU" and "LayerNorm" are measured
here, by the doctor, on the models of `regularizer_problems.py`. Costs are read from docs/regularizer_costs.json, which
`python -m gradreg.experiments.benchmarks.regularizers --json docs/regularizer_costs.json` writes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

import gradreg as gr
from gradreg.experiments.regularizer_problems import PROBLEMS, Problem, verdict

__all__ = ["PAGE", "formula", "main", "page", "source"]

PAGE = Path("docs/regularizers.md")
COSTS = Path("docs/regularizer_costs.json")

_GROUPS = {
    "With respect to inputs or features": "InputGradient",
    "Critics and generators": "WGANGP",
    "Solutions of differential equations": "DerivativeResidual",
    "Several heads or models": "DiverseHeads",
    "With respect to parameters": "IRMv1",
}
"""Headings, each with the first regularizer under it; the order is that of `PROBLEMS`."""

_SYMBOL = 16  # shorter formulas only name a symbol
_OF = {
    "Loss": "loss",
    "TrueLogit": "true logit",
    "TopLogit": "top logit",
    "AllLogits": "every output",
    "Total": "sum of outputs",
    "Projected": "outputs times a random vector",
}
_WRT = {"Inputs": "inputs", "Features": "features", "Params": "parameters"}

_HEAD = """# The regularizers

<!-- Written by `python -m gradreg.experiments.regularizer_page`; edit that program or the docstrings, not this file. -->

All of them are `gr.regularizers.<name>`: a module `(model, batch) -> scalar`, unweighted, for use alone or in `gr.Objective`.
`help(gr.regularizers.<name>)` says which extras of the batch it reads, where published forms differ, and which one this is.

- **of / wrt**: the scalar that is differentiated, and with respect to what, by default.
- **order**: the highest derivative that a training step takes. Those of order 3 write LayerNorm and InstanceNorm out, whose
  third derivatives are wrong in torch 2.13.
- **step**: time of a training step with this loss, in plain steps (forward, task loss and backward) of the same model and
  batch, and in brackets the same by the usual hand-written code. Batch 256, network 1024-512-256, 8 heads or models, 4
  environments; for `DerivativeResidual` and `GradientMatching` see `experiments/benchmarks/contests.py`.
  {costs}
- **ReLU**, **LayerNorm**: whether everything that is trained hears of the loss, and rightly, in a network with two hidden
  layers and ReLU, or with LayerNorm and Softplus. Measured by `gr.check_double_backward`, which compares with finite
  differences. For `GradientMatching` what is trained are the inputs. The gradient of `FiniteDifferenceGradientNorm` is by
  definition not the derivative of its value; it is compared with its formula."""


def page(costs: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        costs: What the benchmark wrote: `{"costs": {name: {"gradreg": ratio, "by_hand": ratio, "date": ..., ...}}}`.

    Returns:
        Markdown.
    """
    measured = costs["costs"]
    lines = [_HEAD.format(costs=_how(measured))]
    starts = {first: title for title, first in _GROUPS.items()}
    for name, problem in PROBLEMS.items():
        if name in starts:
            lines += [
                f"\n## {starts[name]}\n",
                "| loss | formula | of / wrt | order | step (by hand) | ReLU | LayerNorm | source |",
                "|---|---|---|---|---|---|---|---|",
            ]
        penalty = problem.make()
        cells = [
            f"`{name}`",
            _math(formula(type(penalty))),
            _what(penalty, problem),
            str(penalty.order),
            _cost(measured.get(name)),
            verdict(problem, nn.ReLU),
            verdict(problem, nn.Softplus, norm=True),
            source(type(penalty)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def formula(kind: type[gr.Regularizer]) -> str:
    """Return the first formula of a docstring that is more than a symbol."""
    text = inspect.getdoc(kind) or ""
    found = (re.sub(r"\s+", " ", item) for item in re.findall(r"\$([^$]+)\$", text))
    return next(item for item in found if len(item) >= _SYMBOL)


def source(kind: type[gr.Regularizer]) -> str:
    """Return authors, year and link of the first work under "References" of a docstring."""
    text = inspect.getdoc(kind) or ""
    (part,) = re.findall(r"References:\n(.*?)(?:\n\s*\n|\Z)", text, flags=re.DOTALL)
    entry = re.sub(r"\s+", " ", part).strip().split("; ")[0]
    authors = re.split(r', "| (?=(?:19|20)\d\d\b)', entry)[0].split(", ")
    number = re.search(r"arXiv (\d{4}\.\d{4,5})", entry)
    (year, *_) = re.findall(r"\b(?:19|20)\d\d\b", re.sub(r'arXiv \S+|"[^"]*"', "", entry))
    names = authors[0] if len(authors) == 1 else " and ".join(authors) if len(authors) == 2 else f"{authors[0]} et al."
    link = f", [{number[1]}](https://arxiv.org/abs/{number[1]})" if number else ""
    return f"{names} {year}{link}"


def _math(text: str) -> str:
    """Return Markdown in which neither the table nor Markdown touches the formula."""
    return f"$`{text.replace('|', chr(92) + 'vert ')}`$"


def _what(penalty: gr.Regularizer, problem: Problem) -> str:
    holder = getattr(penalty, "estimate", penalty)  # those of Jacobians keep both in one object
    of: Any = holder.of
    scalar = _OF[type(of).__name__]
    if getattr(of, "log_probability", False):
        scalar = "sum of log-probabilities"
    if getattr(of, "centered", False):
        scalar = f"centered {scalar}"
    if problem.wrt:
        return f"{scalar} / {problem.wrt}"
    wrt: Any = holder.wrt
    return f"{scalar} / {_WRT[type(wrt[0] if isinstance(wrt, tuple) else wrt).__name__]}"


def _cost(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else f"{found['gradreg']:.1f} ({found['by_hand']:.1f})"


def _how(measured: Mapping[str, Any]) -> str:
    if not measured:
        return "Not measured yet."
    first, last = (f(item["date"] for item in measured.values()) for f in (min, max))
    versions = sorted({item["torch"] for item in measured.values()})
    machines = sorted({item["machine"] for item in measured.values()})
    return (
        f"`python -m gradreg.experiments.benchmarks.regularizers`, {first if first == last else f'{first} to {last}'},\n"
        f"  torch {', '.join(versions)}, {'; '.join(machines)}."
    )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    costs = json.loads(arguments.costs.read_text()) if arguments.costs.exists() else {"costs": {}}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(page(costs))
    print(f"Written to {arguments.output}.")


if __name__ == "__main__":
    main()
