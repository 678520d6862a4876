"""What the parts of an attribution have to agree on."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradreg.errors import GradregError, closest

__all__ = ["EXAMPLE", "PER", "check", "number", "per_example", "plain"]

EXAMPLE = "example"
"""The name of the first axis, which no axis of targets may have."""

PER = ("token", "feature")


def check(a: Any) -> None:
    """Compare all shapes and keys of `Fields`.

    Raises:
        GradregError: Names the first part that does not fit, its shape, and the shape it should have.
    """
    if a.per not in PER:
        raise GradregError(f"per={a.per!r} is not allowed; allowed are 'token' and 'feature'.")
    if not a.by_key:
        raise GradregError("by_key is empty; an attribution has scores for at least one key.")
    axes = tuple(a.target_axes)
    if len({EXAMPLE, *axes}) != len(axes) + 1 or not all(isinstance(axis, str) and axis for axis in axes):
        raise GradregError(
            f"target_axes={axes!r} is not allowed; names have to be different strings, and none of them {EXAMPLE!r}."
        )
    lead = _leading(a, axes)
    for name in ("change", "delta", "error"):
        value = getattr(a, name)
        if value is not None and (not isinstance(value, Tensor) or tuple(value.shape) != lead):
            raise GradregError(f"{name} is {_shape(value)}; it has one number per target: {_named(lead, axes)}.")
    for name in ("ids", "valid", "segments", "labels"):
        _known_keys(name, getattr(a, name), a.by_key, "a key of by_key")
    for name, allowed in (("ids", "integers"), ("valid", "booleans")):
        for key, value in getattr(a, name).items():
            _per_position(f"{name}[{key!r}]", value, allowed, a.by_key[key], len(axes))
    for key, rows in a.labels.items():
        _check_labels(key, rows, a.by_key[key], len(axes))
    _known_keys("target_labels", a.target_labels, axes, "one of target_axes")
    for axis, names in a.target_labels.items():
        size = lead[1 + axes.index(axis)]
        rows = names if per_example(names) else [names] * lead[0]
        if len(rows) != lead[0] or any(len(row) != size for row in rows):
            raise GradregError(
                f"target_labels[{axis!r}] has {[len(row) for row in rows] if per_example(names) else len(names)} names; the "
                f"axis {axis!r} has {size} targets, of {lead[0]} examples."
            )


def per_example(names: Any) -> bool:
    """Tell whether targets have names of their own in every example."""
    return bool(names) and not isinstance(names[0], str)


def _leading(a: Any, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return `(n, *targets)`, after comparing it between keys."""
    lead: tuple[int, ...] | None = None
    for key, scores in a.by_key.items():
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            found = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
            raise GradregError(f"by_key[{key!r}] is {found}; scores are floating-point tensors.")
        least, exact = 2 + len(axes), a.per == "token"
        if scores.dim() < least or (exact and scores.dim() > least):
            wanted = ", ".join(["n", *axes, "L" if exact else "*shape"])
            raise GradregError(
                f"by_key[{key!r}] has the shape {list(scores.shape)}; per {a.per}, with target_axes={axes!r}, "
                f"it has to be [{wanted}]. Name one axis of targets for every dimension between the two."
            )
        own = tuple(scores.shape[: least - 1])
        if lead is not None and own != lead:
            first = next(iter(a.by_key))
            raise GradregError(
                f"by_key[{key!r}] has examples and targets {list(own)}, by_key[{first!r}] has {list(lead)}; "
                "all keys were attributed to for the same examples and targets."
            )
        lead = own
    assert lead is not None  # by_key is not empty
    return lead


def _per_position(where: str, value: Any, allowed: str, scores: Tensor, targets: int) -> None:
    shape = [scores.shape[0], scores.shape[1 + targets]]
    if not isinstance(value, Tensor) or list(value.shape) != shape:
        raise GradregError(f"{where} is {_shape(value)}; the scores have {shape} examples and positions.")
    fits = value.dtype == torch.bool
    if allowed == "integers":
        fits = not (fits or value.is_floating_point() or value.is_complex())
    if not fits:
        raise GradregError(f"{where} is {value.dtype}; allowed are {allowed}.")


def _check_labels(key: str, rows: Any, scores: Tensor, targets: int) -> None:
    n, positions = scores.shape[0], scores.shape[1 + targets]
    if not isinstance(rows, Sequence) or not all(isinstance(row, Sequence) for row in rows):
        raise GradregError(f"labels[{key!r}] is a {type(rows).__name__}; labels are a list of texts for every example.")
    lengths = [len(row) for row in rows]
    if lengths != [positions] * n:
        raise GradregError(
            f"labels[{key!r}] has lists of lengths {lengths}; the scores have {n} examples of {positions} positions "
            "each (padded ones have a label too, such as '')."
        )
    for row, texts in enumerate(rows):
        for place, text in enumerate(texts):
            if not isinstance(text, str):
                raise GradregError(f"labels[{key!r}][{row}][{place}] is {text!r}; labels are texts.")


def _known_keys(name: str, given: Mapping[str, Any], known: Mapping[str, Any] | Sequence[str], what: str) -> None:
    for key in given:
        if key not in known:
            raise GradregError(f"{name} has the key {key!r}, which is not {what}. Closest: {closest(str(key), known)}.")


def _shape(value: object) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _named(lead: tuple[int, ...], axes: tuple[str, ...]) -> str:
    names = " x ".join(f"{size} {axis}" for size, axis in zip(lead, (EXAMPLE, *axes), strict=True))
    return f"{list(lead)} ({names})"


def number(given: Any, size: int, axis: str) -> int:
    """Return a number along an axis, those below zero counted from the end.

    Raises:
        GradregError: If there is none such.
    """
    try:
        place = operator.index(given)
    except TypeError:
        raise GradregError(f"{axis} {given!r} is no number; allowed are integers from 0 to {size - 1}.") from None
    if isinstance(given, bool) or not -size <= place < size:
        raise GradregError(f"There is no {axis} {given!r}; allowed are integers from 0 to {size - 1}.")
    return place % size


def plain(value: Any) -> Any:
    """Return a value as JSON has it, so that what is kept is what comes back; whatever else it is becomes its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not value.is_complex() else f"tensor of shape {list(value.shape)}"
    return str(value)
