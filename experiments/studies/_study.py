"""What a study is: published behavior reproduced over seeds, with the baseline beside the method."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import nn

import gradreg as gr
from gradreg.experiments.labels import arm_color

__all__ = ["BASELINE", "METHOD", "REFERENCE", "Outcome", "Scores", "Study", "StudyError", "fit", "mlp"]

BASELINE, METHOD, REFERENCE = (arm_color(name, 0) for name in ("no_penalty", "penalty", "penalty_without_l1"))

Scores = dict[str, dict[str, float]]
"""Row of the table, then column, then value."""


class StudyError(gr.errors.GradregError):
    """A study with settings that are not allowed."""


@dataclass(frozen=True)
class Outcome:
    """What one seed gives.

    Args:
        scores: The numbers of the table.
        details: What only the figure needs, as JSON values.
    """

    scores: Scores
    details: dict[str, Any] = field(default_factory=dict)


class Study(ABC):
    """Base of the studies: frozen dataclasses whose numeric fields are checked when they are made.

    Attributes:
        columns: What the columns are, and by what rule hyperparameters were chosen.
        claim: What was published, and where.
        criterion: When a seed counts as reproducing it, in words; `reproduced` decides.
        metric: Row and column of the number that sweepers and the index get.
        number: How the table prints numbers.
    """

    columns: ClassVar[str]
    claim: ClassVar[str]
    criterion: ClassVar[str]
    metric: ClassVar[tuple[str, str]]
    number: ClassVar[str] = ".3f"
    _from_zero: ClassVar[tuple[str, ...]] = ()
    _shares: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        problems = []
        for item in fields(self):  # type: ignore[arg-type]  # studies are dataclasses
            value = getattr(self, item.name)
            if isinstance(value, list):
                object.__setattr__(self, item.name, tuple(value))  # equal settings are equal studies
            problems += self._problems(item.name, value, several=isinstance(item.default, tuple))
        if problems:
            raise StudyError(" ".join(problems))

    def _problems(self, name: str, value: Any, several: bool) -> list[str]:
        """Judge a field: shares lie from 0 to 1, all other numbers are above 0, or from 0 up."""
        if several and (not isinstance(value, (list, tuple)) or not value):
            return [f"{name}: {value!r} is not allowed; give a list with one number or more."]
        for one in value if several else [value]:
            if isinstance(one, bool) or not isinstance(one, (int, float)) or not math.isfinite(one):
                return [f"{name}: {value!r} is not allowed; allowed are finite numbers."]
            if name in self._shares and not 0 <= one <= 1:
                return [f"{name}: {value!r} is not allowed; allowed are numbers from 0 to 1."]
            if name not in self._shares and (one < 0 if name in self._from_zero else one <= 0):
                allowed = "from 0 up" if name in self._from_zero else "above 0"
                return [f"{name}: {value!r} is not allowed; allowed are numbers {allowed}."]
        return []

    @abstractmethod
    def run(self, seed: int) -> Outcome:
        """Train and measure baseline and method; everything random is derived from the seed."""

    @abstractmethod
    def reproduced(self, scores: Scores) -> bool:
        """Tell whether the scores of one seed show what was published."""

    @abstractmethod
    def draw(self, results: Mapping[str, Any]) -> Figure:
        """Draw the results of all seeds, as they are in `results.json`."""


def mlp(inputs: int, width: int, outputs: int, activation: type[nn.Module], hidden: int = 2) -> nn.Sequential:
    """Return a perceptron with that many hidden layers."""
    layers: list[nn.Module] = [nn.Flatten()]
    for size in [inputs, *[width] * (hidden - 1)]:
        layers += [nn.Linear(size, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def fit(
    model: nn.Module,
    objective: gr.Objective,
    batches: Iterable[gr.Batch],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> None:
    """Take one step per batch."""
    for batch in batches:
        optimizer.zero_grad()
        objective(model, batch)[0].backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
