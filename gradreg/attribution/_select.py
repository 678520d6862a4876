"""The part of an attribution that belongs to some examples or targets."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradreg.attribution._check import EXAMPLE
from gradreg.errors import GradregError, closest

if TYPE_CHECKING:
    from gradreg.attribution._result import Attribution

__all__ = ["number", "select"]


def select(a: Attribution, axis: str, which: int | Sequence[int]) -> Attribution:
    """Take numbers along an axis from every part that has it."""
    axes = (EXAMPLE, *a.target_axes)
    if axis not in axes:
        raise GradregError(f"There is no axis {axis!r}. Closest: {closest(axis, axes)}.")
    place = axes.index(axis)
    first = next(iter(a.by_key.values()))
    alone = isinstance(which, int)
    asked: list[Any] = [which] if alone else list(which)  # type: ignore[arg-type]  # isinstance told
    numbers = [number(one, first.shape[place], axis) for one in asked]
    if not numbers:
        raise GradregError(f"Nothing of the axis {axis!r} is selected; give at least one number.")
    drop = alone and place > 0

    def take(value: Tensor) -> Tensor:
        if drop:
            return value.select(place, numbers[0])
        return value.index_select(place, torch.tensor(numbers, device=value.device))

    changed: dict[str, Any] = {"by_key": {key: take(value) for key, value in a.by_key.items()}}
    for name in ("change", "delta", "error"):
        value = getattr(a, name)
        changed[name] = None if value is None else take(value)
    if place == 0:
        for name in ("ids", "valid"):
            changed[name] = {key: take(value) for key, value in getattr(a, name).items()}
        changed["labels"] = {key: [rows[one] for one in numbers] for key, rows in a.labels.items()}
    else:
        names = dict(a.target_labels)
        if axis in names:
            names[axis] = [names[axis][one] for one in numbers]
        if drop:
            names.pop(axis, None)
            changed["target_axes"] = tuple(one for one in a.target_axes if one != axis)
        changed["target_labels"] = names
    return dataclasses.replace(a, **changed)


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
