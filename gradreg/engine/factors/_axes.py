"""Where the examples are: found by comparing forwards of three and of two examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradreg.engine.factors._record import Call


@dataclass(frozen=True)
class Axis:
    """The axis of examples of a tensor, with `per_example` consecutive places for each."""

    position: int
    per_example: int = 1

    def fits(self, shape: tuple[int, ...], rows: int) -> bool:
        """Whether a shape has room for `rows` examples here."""
        return self.position < len(shape) and shape[self.position] == rows * self.per_example


@dataclass(frozen=True)
class CallAxes:
    """The axes of one call: of the leaves of its arguments and of its result; None where examples have no axis."""

    inputs: tuple[Axis | None, ...]
    outputs: tuple[Axis | None, ...]

    @property
    def per_example(self) -> int | None:
        """The number of places per example, None where leaves differ in it or none is batched."""
        found = {axis.per_example for axis in (*self.inputs, *self.outputs) if axis is not None}
        return found.pop() if len(found) == 1 else None

    def fit(self, call: Call, rows: int) -> bool:
        """Whether a call with `rows` examples has its examples at these places."""
        outputs = zip(call.outputs, self.outputs, strict=False)
        pairs = [*zip(_shapes(call.inputs), self.inputs, strict=False), *outputs]
        if len(pairs) != len(call.inputs) + len(call.outputs) or len(pairs) != len(self.inputs) + len(self.outputs):
            return False
        return all(axis is None or (shape is not None and axis.fits(shape, rows)) for shape, axis in pairs)


def axes_of(three: Call, two: Call) -> CallAxes | None:
    """Compare a call in a forward of three examples with the same in one of two; None where they do not correspond."""
    inputs = _shapes(three.inputs), _shapes(two.inputs)
    if len(inputs[0]) != len(inputs[1]) or len(three.outputs) != len(two.outputs):
        return None
    pairs = [*zip(*inputs, strict=True), *zip(three.outputs, two.outputs, strict=True)]
    found: list[Axis | None] = []
    for one, other in pairs:
        if one is None or other is None or one == other:
            found.append(None)
            continue
        axis = _axis(one, other)
        if axis is None:
            return None
        found.append(axis)
    count = len(inputs[0])
    return CallAxes(tuple(found[:count]), tuple(found[count:]))


def _shapes(leaves: list[Any]) -> list[tuple[int, ...] | None]:
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]


def _axis(three: tuple[int, ...], two: tuple[int, ...]) -> Axis | None:
    if len(three) != len(two):
        return None
    different = [i for i, (one, other) in enumerate(zip(three, two, strict=True)) if one != other]
    if len(different) != 1:
        return None
    (position,) = different
    per_example, rest = divmod(three[position], 3)
    return Axis(position, per_example) if rest == 0 and two[position] == 2 * per_example else None


def examples_first(tensor: Tensor, axis: Axis) -> Tensor:
    """Move the axis of examples to the front."""
    return tensor if axis.position == 0 else tensor.movedim(axis.position, 0)
