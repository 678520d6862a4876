"""Schedules: the weight of a regularizer as a function of the step. The step is counted by `Objective`, from 0."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from gradreg.errors import GradregError

__all__ = ["Anneal", "Constant", "Every", "Schedule", "WarmUp", "as_schedule"]

Schedule: TypeAlias = Callable[[int], float]


def _checked(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value < 0:
        raise GradregError(f"{name}={value!r}; a weight must be a plain, finite number from 0 (float), or a schedule.")
    return float(value)


def _checked_steps(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GradregError(f"{name}={value!r}; it must be a whole number of steps from 1.")
    return value


@dataclass(frozen=True)
class Constant:
    """The same weight at every step.

    Example:
        >>> from gradreg.schedules import Constant
        >>> Constant(2.0)(100)
        2.0
    """

    weight: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", _checked("weight", self.weight))

    def __call__(self, step: int) -> float:
        """Return the weight at a step."""
        return self.weight


@dataclass(frozen=True)
class WarmUp:
    """A weight that rises linearly from 0, reached after `steps` steps; `start` steps of nothing before.

    Example:
        >>> from gradreg.schedules import WarmUp
        >>> [WarmUp(1.0, steps=4)(step) for step in (0, 1, 4, 9)]
        [0.0, 0.25, 1.0, 1.0]
    """

    weight: float
    steps: int
    start: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", _checked("weight", self.weight))
        _checked_steps("steps", self.steps)
        if self.start < 0:
            raise GradregError(f"start={self.start!r}; it must be a step from 0.")

    def __call__(self, step: int) -> float:
        """Return the weight at a step."""
        return self.weight * min(max(step - self.start, 0) / self.steps, 1.0)


@dataclass(frozen=True)
class Anneal:
    """A weight that falls along half a cosine to `final`, reached after `steps` steps; full weight before `start`.

    Example:
        >>> from gradreg.schedules import Anneal
        >>> [round(Anneal(1.0, steps=4)(step), 3) for step in (0, 2, 4, 9)]
        [1.0, 0.5, 0.0, 0.0]
    """

    weight: float
    steps: int
    final: float = 0.0
    start: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", _checked("weight", self.weight))
        object.__setattr__(self, "final", _checked("final", self.final))
        _checked_steps("steps", self.steps)

    def __call__(self, step: int) -> float:
        """Return the weight at a step."""
        done = min(max(step - self.start, 0) / self.steps, 1.0)
        return self.final + (self.weight - self.final) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Every:
    """A weight at every k-th step only (0, k, 2k, ...), multiplied by k so that the average over steps stays.

    Args:
        k: Steps from one application to the next.
        weight: A number or another schedule.
        rescale: Multiply by k, as lazy regularization does (Karras et al. 2020, arXiv 1912.04958).

    Example:
        >>> from gradreg.schedules import Every
        >>> [Every(2, 0.5)(step) for step in (0, 1, 2, 3)]
        [1.0, 0.0, 1.0, 0.0]
    """

    k: int
    weight: float | Schedule = 1.0
    rescale: bool = True

    def __post_init__(self) -> None:
        _checked_steps("k", self.k)
        object.__setattr__(self, "weight", as_schedule(self.weight))

    def __call__(self, step: int) -> float:
        """Return the weight at a step."""
        return as_schedule(self.weight)(step) * (self.k if self.rescale else 1) if step % self.k == 0 else 0.0


def as_schedule(weight: float | Schedule) -> Schedule:
    """Return a schedule from a number or a function of the step.

    Raises:
        GradregError: If it is a negative or non-finite number, or neither a number nor callable.
    """
    if callable(weight):
        return weight
    return Constant(_checked("weight", weight))


def weight_at(schedule: Schedule, step: int, name: str) -> float:
    """Evaluate a schedule and check what it returns."""
    return _checked(f"The weight of {name!r} at step {step}", schedule(step))
