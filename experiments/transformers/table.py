"""Measure the families of transformers and write the table of docs/transformers.md.

    python -m gradreg.experiments.transformers.table

The numbers of the installed version of transformers go into docs/transformers_families.json, beside those of other versions;
the table shows the newest, and what an older one does differently.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import collect_factors
from gradreg.errors import CompatibilityError, GradregWarning
from gradreg.experiments.transformers.families import FAMILIES, Family

__all__ = ["NUMBERS", "PAGE", "main", "measured", "table"]

PAGE = Path("docs/transformers.md")
NUMBERS = Path("docs/transformers_families.json")
BEGIN, END = "<!-- families -->", "<!-- end of families -->"

_HEADER = (
    "| model | embeddings | maps | seen as | error, embeddings | error, maps | layer factors | differentiable | notes |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def classes(outputs: Any, batch: gr.Batch) -> Tensor:
    """Return three logits and their probabilities: of the example, or of its second position."""
    z = outputs.logits if outputs.logits.dim() == 2 else outputs.logits[:, 1]
    return torch.cat([z[:, :3], z.softmax(-1)[:, :3]], 1)


def measured(family: Family) -> dict[str, Any]:
    """Return what is found of a family: names, ways, and the largest errors against eager attention and a loop."""
    model, batch = family.make(), family.batch()
    eager = model if family.maps == 0 else family.make("eager")
    wrt: tuple[gr.wrt.Wrt, ...] = (gr.Embeddings(), gr.AttentionMaps())
    row: dict[str, Any] = {"class": family.model, "dtype": str(family.dtype).removeprefix("torch.")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradregWarning)
        try:
            row["seen as"] = _seen(gr.plan(model, batch, classes, wrt))
        except CompatibilityError:
            wrt, row["seen as"] = wrt[:1], "none"
        found = gr.gradients(model, batch, classes, wrt)
        maps = {key: value for key, value in found.items() if ":attention" in key}
        tables = {key: value for key, value in found.items() if key not in maps}
        points, expected, weights = _by_hand(eager, batch, [key.partition("#")[0] for key in tables])
        row["embeddings"] = list(dict.fromkeys(key.partition("#")[0] for key in tables))
        row["maps"] = len(maps)
        row["error, embeddings"] = _error(list(tables.values()), points)
        seen = [weight.detach()[:, None] > 0 for weight in weights]  # what a masked key would do depends on the code
        row["error, maps"] = _error(
            [value * mask for value, mask in zip(maps.values(), seen, strict=True)],
            [value * mask for value, mask in zip(expected, seen, strict=True)],
        )
        row.update(_parameters(model, batch))
    return row


def _parameters(model: nn.Module, batch: gr.Batch) -> dict[str, Any]:
    def total(outputs: Any, own: gr.Batch) -> Tensor:
        return classes(outputs, own).square().sum(1)

    everything = gr.Params("*")
    looped = gr.gradients(model, batch, total, everything, route="loop")
    factors = collect_factors(model, batch, total, everything)
    served = sum(part.numel for part in factors.coverage if part.rule not in (None, "gradients"))
    plan = gr.plan(model, batch, total, everything, differentiable=True)
    graph = gr.gradients(model, batch, total, everything, differentiable=True)
    return {
        "factors": served / sum(part.numel for part in factors.coverage),
        "error, factors": _error([factors.gradient(name).reshape(v.shape) for name, v in looped.items()], [*looped.values()]),
        "route": plan.route,
        "reason": plan.rejected.get("vmap", "").partition(";")[0] if plan.route == "loop" else "",
        "error, differentiable": _error([graph[name].detach() for name in looped], [*looped.values()]),
    }  # fmt: skip


def _seen(plan: gr.Plan) -> str:
    how = next(note for note in plan.notes if note.startswith("attention maps: "))
    return "eager" if "eager" in how else "softmax" if "softmax" in how else "sdpa"


def _by_hand(
    model: nn.Module, batch: gr.Batch, names: Sequence[str]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return gradients at embeddings and returned attentions, and these, from autograd and hooks of our own."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.append(output if output.requires_grad else output.detach().requires_grad_())
        return seen[-1]

    hooks = [model.get_submodule(name).register_forward_hook(keep) for name in dict.fromkeys(names)]
    try:
        outputs = model(**batch.inputs, output_attentions=True) if _has_attention(model) else model(**batch.inputs)
    finally:
        for hook in hooks:
            hook.remove()
    maps = _attentions(outputs)
    values = classes(outputs, batch)
    columns = [
        torch.autograd.grad(values[:, k].sum(), [*seen, *maps], retain_graph=True) for k in range(values.shape[1])
    ]
    found = [torch.stack(column, 1) for column in zip(*columns, strict=True)]
    return found[: len(seen)], found[len(seen) :], maps


def _has_attention(model: nn.Module) -> bool:
    return hasattr(getattr(model, "config", None), "num_attention_heads")


def _attentions(outputs: Mapping[str, Any]) -> list[Tensor]:
    if "encoder_attentions" not in outputs:
        return list(outputs.get("attentions") or ())
    pairs = zip(outputs["decoder_attentions"], outputs["cross_attentions"], strict=True)
    return [*outputs["encoder_attentions"], *(each for pair in pairs for each in pair)]


def _error(found: list[Tensor], expected: list[Tensor]) -> float | None:
    """Return the largest difference as a share of the largest number."""
    if not expected:
        return None
    pairs = list(zip(found, expected, strict=True))
    largest = max(float(value.abs().max()) for value in expected)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs) / largest


def table(numbers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the table as Markdown.

    Args:
        numbers: From the version of transformers to family to what was measured.
    """
    versions = sorted(numbers, key=_version)
    newest = versions[-1]
    lines = [f"Measured with transformers {newest}.", "", _HEADER]
    for name, row in numbers[newest].items():
        notes = [row["reason"]] if row["reason"] else []
        notes += ["in float32"] if row["dtype"] == "float32" else []
        notes += [
            text
            for old in versions[:-1]
            if name in numbers[old]
            for text in [_unlike(old, numbers[old][name], row)]
            if text
        ]
        cells = [
            f"{name}",
            ", ".join(f"`{module}`" for module in row["embeddings"]),
            str(row["maps"]) if row["maps"] else "none",
            row["seen as"] if row["maps"] else "",
            _number(row["error, embeddings"]),
            _number(row["error, maps"]),
            f"{100 * row['factors']:.0f} % ({_number(row['error, factors'])})",
            f"{row['route']} ({_number(row['error, differentiable'])})",
            "; ".join(notes),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _unlike(version: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Say what an older version does differently."""
    parts = []
    if old["seen as"] != new["seen as"]:
        parts.append(f"maps as {old['seen as']}")
    if old["maps"] != new["maps"]:
        parts.append(f"{old['maps']} maps")
    if old["route"] != new["route"]:
        parts.append(f"{old['route']}" + (f", {old['reason']}" if old["reason"] else ""))
    return f"{version}: " + ", ".join(parts) if parts else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}" if value else "0"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = print) -> None:
    """Measure all families with the installed transformers, and write numbers and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table-only", action="store_true", help="write the table from the numbers as they are")
    options = parser.parse_args(arguments)
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    if not options.table_only:
        import transformers

        rows = {}
        for family in FAMILIES:
            rows[family.name] = measured(family)
            say(f"{family.name}: {rows[family.name]}")
        numbers[transformers.__version__] = rows
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(numbers)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
