"""What every parameter gets from a penalty, compared with finite differences where that is in doubt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradreg.diagnosis._finite import Differences
from gradreg.diagnosis._report import (
    DISCONNECTED,
    EXPECTED_ZERO,
    OK,
    PARTLY_ZERO,
    TINY,
    UNSUPPORTED,
    WRONG,
    ZERO,
    ParameterReport,
)
from gradreg.diagnosis._stand_ins import has_second_pass
from gradreg.diagnosis._trial import Trial
from gradreg.engine import GradientCall, Record

PARTLY_FROM = 0.01
"""Gradients with this share of exact zeros are called partly zero."""


@dataclass
class Measurement:
    """What was measured.

    Attributes:
        value: The penalty; None if it raised.
        parameters: What every trainable parameter gets.
        connected: Whether the penalty carries a graph.
        moved: Parameters without gradient on which the penalty does depend.
        error: What was raised, if anything.
    """

    value: float | None = None
    parameters: dict[str, ParameterReport] = field(default_factory=dict)
    connected: bool = True
    moved: list[str] = field(default_factory=list)
    error: Exception | None = None

    def silent(self, names: Iterable[str]) -> bool:
        """Whether none of these parameters hears anything that would change it."""
        quiet = (ZERO, DISCONNECTED, EXPECTED_ZERO, TINY)
        found = [self.parameters[name] for name in names if name in self.parameters]
        return bool(found) and all(report.status in quiet for report in found)

    def block(self, names: Iterable[str]) -> None:
        """Mark parameters of a part that hears nothing: what would be mathematics for one of them is a loss for all."""
        for name in names:
            report = self.parameters.get(name)
            if report is not None:
                status = report.status
                if status == EXPECTED_ZERO:
                    status = DISCONNECTED if report.norm is None else ZERO
                self.parameters[name] = replace(report, status=status, blocked=True)


def measure(trial: Trial, *, double: bool, resolution: float) -> Measurement:
    """Measure what every trainable parameter gets.

    Args:
        trial: The penalty.
        double: Whether it is computed in float64.
        resolution: The relative precision of the model's own dtype.

    Returns:
        The statuses of single parameters; whether a whole part is silent is for `silent_paths`.
    """
    try:
        value, gradients = trial.gradients()
    except Exception as error:  # whatever the model raises is what the user would see
        text = _first_line(error)
        reports = {name: ParameterReport(UNSUPPORTED, True, text=text) for name in trial.trained}
        return Measurement(None, reports, error=error)
    found = Measurement(float(value.detach()), connected=value.requires_grad)
    first = trial.first_order()
    for name, gradient in gradients.items():
        found.parameters[name] = _report(gradient, first.get(name), resolution)
    differences = Differences(trial, double)
    if not torch.isfinite(value.detach()) or not _all_finite(gradients):
        return found
    if not differences.steady():
        trial.notes.append("The penalty is not deterministic, so it was not compared with finite differences.")
        return found
    if has_second_pass(trial.inner):
        trial.notes.append(
            "A surrogate stands in for the second derivative of flat activations (second pass), so nothing was compared with "
            "finite differences."
        )
        return found
    _settle_zeros(found, gradients, differences)
    _settle_others(found, gradients, differences)
    if not trial.calm and any(report.blocked for report in found.parameters.values()):
        return _without_moving_buffers(trial, found, double, resolution)
    return found


def _without_moving_buffers(trial: Trial, found: Measurement, double: bool, resolution: float) -> Measurement:
    """Look again without what a forward in train mode changes outside of the graph, such as vectors of spectral norms.

    Differences follow such a change and gradients do not, by intention.
    """
    moving = trial.moving()
    if not moving:
        return found
    trial.calm = list(moving.values())
    again = measure(trial, double=double, resolution=resolution)
    if again.error is not None or any(report.blocked for report in again.parameters.values()):
        trial.calm = []
        return found
    names = ", ".join(moving)
    trial.notes.append(
        f"Measured with {names} in eval mode: in train mode buffers follow the parameters without gradient."
    )
    return again


def silent_paths(found: Measurement, record: Record, names: dict[int, str]) -> list[GradientCall]:
    """Block whole parts that hear nothing, and return the gradients that end in front of them.

    A part is all that lies before what is differentiated with respect to: the base before the features.
    """
    paths = [path for path in record.gradients if path.keeps_graph]
    silent = []
    for path in paths:
        before = [names[leaf] for leaf in path.upstream if leaf in names]
        if found.silent(before):
            found.block(before)
            silent.append(path)
    if found.silent(found.parameters):
        found.block(found.parameters)
        silent = silent or paths
    return silent


def _report(gradient: Tensor | None, first: Tensor | None, resolution: float) -> ParameterReport:
    if gradient is None:
        return ParameterReport(EXPECTED_ZERO, zero_share=1.0)
    norm = float(gradient.detach().abs().square().sum().sqrt())
    size = float(first.detach().abs().square().sum().sqrt()) if first is not None else 0.0
    relative = norm / size if size > 0 else None
    zeros = 1 - int(gradient.count_nonzero()) / max(gradient.numel(), 1)
    if not norm < float("inf"):
        return ParameterReport(WRONG, True, zeros, norm, relative, f"its gradient is {norm}")
    if zeros == 1:
        status = EXPECTED_ZERO
    elif relative is not None and relative < resolution:
        status = TINY
    else:
        status = PARTLY_ZERO if zeros >= PARTLY_FROM else OK
    return ParameterReport(status, False, zeros, norm, relative)


def _settle_zeros(found: Measurement, gradients: dict[str, Tensor | None], differences: Differences) -> None:
    """Find parameters without gradient on which the penalty does depend."""
    nothing = [name for name, report in found.parameters.items() if report.status == EXPECTED_ZERO]
    if not nothing or differences.is_zero(nothing) is True:
        return
    for name in nothing:
        if differences.is_zero([name]) is False and differences.is_zero([name], seed=1) is False:
            status = DISCONNECTED if gradients[name] is None else WRONG
            text = "finite differences are not zero"
            found.parameters[name] = replace(found.parameters[name], status=status, blocked=True, text=text)
            found.moved.append(name)


def _settle_others(found: Measurement, gradients: dict[str, Tensor | None], differences: Differences) -> None:
    """Compare gradients with finite differences: all together, and one by one where they disagree."""
    dense = {name: g.detach() for name, g in gradients.items() if g is not None and bool(g.count_nonzero())}
    if not dense or not _disagree(dense, differences):
        return
    accused = [name for name, gradient in dense.items() if _disagree({name: gradient}, differences)]
    for name in accused or dense:
        text = "disagrees with finite differences"
        found.parameters[name] = replace(found.parameters[name], status=WRONG, blocked=True, text=text)


def _disagree(gradients: dict[str, Tensor], differences: Differences) -> bool:
    return all(differences.is_right(gradients, seed) is False for seed in (0, 1))


def _all_finite(gradients: dict[str, Tensor | None]) -> bool:
    return all(gradient is None or bool(torch.isfinite(gradient).all()) for gradient in gradients.values())


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if len(lines) > 1 and lines[0].endswith(":") else (lines or [type(error).__name__])[0]
