"""From sums over a path to an `Attribution`: completeness, names of axes, provenance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradreg.attribution._accumulate import Task
from gradreg.attribution._path import Path
from gradreg.attribution._result import Attribution
from gradreg.attribution._sources import Sources
from gradreg.attribution._versions import version_of
from gradreg.errors import AttributionWarning, warn
from gradreg.model import unwrap
from gradreg.scalars import AcrossHeads, all_logits

__all__ = ["assembled", "change_of", "over_units", "scalars_of", "warn_of_non_finite"]


def scalars_of(task: Task, sources: Sources) -> Tensor:
    """Return the scalars at the values themselves, `[n, (K,) *targets]`."""
    n = len(task.batch)
    return task.at(sources.values, torch.arange(n), differentiable=task.differentiable)


def change_of(task: Task, path: Path, at_input: Tensor, row_chunk: int) -> Tensor:
    """Return f(x) minus the weighted mean of f at the starts, `[n, (K,) *targets]`."""
    count, n = next(iter(path.starts.values())).shape[:2]
    shares = torch.zeros(count, dtype=torch.float64, device=path.which.device)
    shares = shares.index_add(0, path.which, path.weights[0].double())
    total = torch.zeros_like(at_input)
    for first in range(0, count * n, row_chunk):
        rows = torch.arange(first, min(first + row_chunk, count * n), device=path.which.device)
        k, examples = rows // n, rows % n
        values = {key: start[k, examples] for key, start in path.starts.items()}
        found = task.at(values, examples, differentiable=task.differentiable)
        weights = shares[k].to(found)
        total = total.index_add(0, examples, found * weights.reshape(-1, *[1] * (found.dim() - 1)))
    return at_input - total


def over_units(by_key: Mapping[str, Tensor], like: Tensor, reduce: str) -> Tensor:
    """Reduce scores `[n, ..., *units]` over all units of all keys, `"sum"` or `"amax"`, to the shape of `like`."""
    columns = []
    for scores in by_key.values():
        flat = scores.reshape(*like.shape, -1)
        columns.append(flat.sum(-1) if reduce == "sum" else flat.amax(-1))
    stacked = torch.stack(columns)
    return stacked.sum(0) if reduce == "sum" else stacked.amax(0)


def assembled(
    task: Task,
    sources: Sources,
    by_key: Mapping[str, Tensor],
    *,
    method: str,
    per: str,
    scalars: Tensor,
    change: Tensor | None = None,
    error: Tensor | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Attribution:
    """Return the attribution.

    Args:
        task: What was attributed.
        sources: To what.
        by_key: The scores.
        method: Name of the method.
        per: `"token"` or `"feature"`.
        scalars: The scalars at the input, for the names of axes.
        change: f(x) - f(b), where there is a baseline.
        error: The estimated error.
        provenance: What else made it.
    """
    warn_of_non_finite(by_key, scalars)
    _check_reached(by_key)
    delta = None if change is None else over_units(by_key, scalars, "sum") - change.to(next(iter(by_key.values())))
    tokens = per == "token"
    value = next(iter(sources.values.values()))
    made = {
        "gradreg": version_of("gradreg"),
        "torch": torch.__version__,
        "transformers": version_of("transformers") if hasattr(unwrap(task.model), "config") else None,
        "model": type(unwrap(task.model)).__name__,
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": value.device.type,
        "attention": _attention(task, provenance or {}),
        "of": repr(task.of),
        "wrt": repr(task.wrt),
        "differentiable": task.differentiable,
        **(provenance or {}),
    }
    return Attribution(
        dict(by_key),
        method,
        per,
        change=change,
        delta=delta,
        error=error,
        target_axes=(axes := _axes(task, scalars)),
        target_labels=_class_names(task, scalars, axes),
        ids=dict(sources.ids) if tokens else {},
        valid=dict(sources.valid) if tokens else {},
        segments=dict(sources.segments) if tokens else {},
        provenance={key: item for key, item in made.items() if item is not None},
    )


def warn_of_non_finite(by_key: Mapping[str, Tensor], scalars: Tensor) -> None:
    """Warn of scores, or of what they are of, that are NaN or infinite."""
    for what, value in (("Targets", scalars), *((f"Scores of {key!r}", scores) for key, scores in by_key.items())):
        bad = ~value.detach().isfinite().reshape(len(value), -1).all(1)
        if bool(bad.any()):
            warn(
                f"{what} are not finite in {int(bad.sum())} of {len(bad)} examples, example {int(bad.nonzero()[0])} first. Look "
                "for NaN in the weights or inputs, and for values that are too large for the dtype.",
                AttributionWarning,
            )
            return


def _check_reached(by_key: Mapping[str, Tensor]) -> None:
    """Warn of keys without any score beside others: what is put in place of a later point cuts off the earlier ones."""
    silent = [key for key, scores in by_key.items() if not bool(scores.detach().count_nonzero())]
    if silent and len(silent) < len(by_key):
        warn(
            f"All scores of {', '.join(map(repr, silent))} are zero beside those of other keys. Along a path all keys are put "
            "in place together, so that points which lead only to other points do not count; attribute to them one by one.",
            AttributionWarning,
        )


def _axes(task: Task, scalars: Tensor) -> tuple[str, ...]:
    heads = ("head",) if task.leading == 2 else ()
    count = scalars.dim() - 1 - len(heads)
    if isinstance(task.of, type(all_logits())):
        before = count - 1
        return (
            heads
            + (("token",) if before == 1 else tuple(f"axis {i}" for i in range(before)))
            + ("class",) * (count > 0)
        )
    if count == 1:  # of gradreg's own scalars only tokens are several; what a function of the user's gives is not known
        of = task.of.function if isinstance(task.of, AcrossHeads) else task.of
        return (*heads, "token" if type(of).__module__.startswith("gradreg.scalars") else "target")
    return heads + tuple(f"target {i}" for i in range(count))


def _class_names(task: Task, scalars: Tensor, axes: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the names that the configuration of a model has for its classes, where somebody gave them."""
    known = getattr(getattr(unwrap(task.model), "config", None), "id2label", None) or {}
    count = scalars.shape[-1]
    if not axes or axes[-1] != "class" or len(known) != count:
        return {}
    names = [str(known.get(i, known.get(str(i), f"LABEL_{i}"))) for i in range(count)]
    return {} if names == [f"LABEL_{i}" for i in range(count)] else {"class": names}


def _attention(task: Task, provenance: Mapping[str, Any]) -> str | None:
    """Say how attention was computed, where the model has a choice."""
    configured = getattr(getattr(unwrap(task.model), "config", None), "_attn_implementation", None)
    if configured != "sdpa":
        return configured if isinstance(configured, str) else None
    twice = task.differentiable or str(provenance.get("plan", "")).startswith("forward")
    return "sdpa, math kernel" if twice else "sdpa"
