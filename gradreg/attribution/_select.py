"""The part of an attribution that belongs to some examples or targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradreg.attribution._check import EXAMPLE, number, per_example
from gradreg.attribution._fields import Fields
from gradreg.attribution._look import TOKEN, target_names
from gradreg.errors import GradregError, closest

__all__ = ["select"]

Some = TypeVar("Some", bound=Fields)


def select(a: Some, axis: str, which: int | Sequence[int]) -> Some:
    """Take numbers along an axis from every part that has it."""
    axes = (EXAMPLE, *a.target_axes)
    if axis not in axes:
        raise GradregError(f"There is no axis {axis!r}. Closest: {closest(axis, axes)}.")
    place = axes.index(axis)
    first = next(iter(a.by_key.values()))
    alone = not isinstance(which, (Sequence, Tensor)) or isinstance(which, str)
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
        changed["target_labels"] = {
            name: [own[one] for one in numbers] if per_example(own) else own for name, own in a.target_labels.items()
        }
    else:
        names = dict(a.target_labels)
        if axis == TOKEN and axis not in names:  # which targets are left can no longer be told from the positions
            rows = [target_names(a, place - 1, example) for example in range(first.shape[0])]
            names |= {axis: rows} if any(any(row) or None in row for row in rows) else {}
        if axis in names:
            own = names[axis]
            names[axis] = [_of(row, numbers) for row in own] if per_example(own) else _of(own, numbers)
        if drop:
            names.pop(axis, None)
            changed["target_axes"] = tuple(one for one in a.target_axes if one != axis)
        changed["target_labels"] = names
    return dataclasses.replace(a, **changed)


def _of(row: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    return [row[one] for one in numbers]
