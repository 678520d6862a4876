"""First and second derivatives against finite differences, in float64 along random directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd import gradgradcheck

from gradreg.model import swapped
from gradreg.testing.checks._report import NotApplicable, PropertyError
from gradreg.testing.checks._trial import Subject, Trial, gradient_of, normal_like

Gradients = dict[str, Tensor | None]

_STEPS = (1e-3, 1e-4, 1e-5)  # the smaller ones where a kink lies within the first
_ATTEMPTS = 3
_RELATIVE = 1e-5
_FEW = 64  # entries of a tensor that are searched for the worst one


def first_derivative(subject: Subject) -> str:
    """The gradient with respect to every parameter and input that requires grad equals central finite differences."""

    def gradient(trial: Trial) -> tuple[Gradients, float]:
        found = trial.gradient()
        return found, _norm(found) + abs(trial.number())

    return _compare(subject, gradient, Trial.number, "first")


def second_derivative(subject: Subject) -> str:
    """The gradient of a random projection of the gradient equals finite differences of that projection."""

    def projected(trial: Trial, create_graph: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(17)
        total = torch.zeros((), dtype=torch.float64)
        gradients = trial.gradient(create_graph)
        for name, variable in trial.variables().items():
            direction, gradient = normal_like(variable, generator), gradients[name]
            if gradient is not None:
                total = total + (gradient * direction).sum()
        return total

    def gradient(trial: Trial) -> tuple[Gradients, float]:
        value = projected(trial, create_graph=True)
        found = gradient_of(value, trial.variables())
        return found, _norm(found) + abs(float(value.detach()))

    return _compare(subject, gradient, lambda trial: float(projected(trial).detach()), "second")


def torch_gradgradcheck(subject: Subject) -> str:
    """`torch.autograd.gradgradcheck` in fast mode passes, at a nearby point if a kink lies at this one."""
    trial = subject.trial()
    variables = _checked(trial)
    names = [name for name in variables if name in dict(trial.model.named_parameters())]
    if not names:
        raise NotApplicable("no parameter requires grad")

    def value(*tensors: Tensor) -> Tensor:
        with swapped(trial.model, dict(zip(names, tensors, strict=True))):
            return trial.value()

    tensors = [variables[name] for name in names]
    for attempt in range(_ATTEMPTS):
        try:
            gradgradcheck(value, tensors, fast_mode=True)
        except RuntimeError as problem:
            if attempt == _ATTEMPTS - 1:
                raise PropertyError(f"torch says: {str(problem).strip()[:300]}") from problem
            trial.jitter(attempt)
        else:
            return f"{len(names)} tensors"
    return ""


def _compare(
    subject: Subject,
    gradient: Callable[[Trial], tuple[Gradients, float]],
    number: Callable[[Trial], float],
    order: str,
) -> str:
    trial = subject.trial()
    left, errors = list(_checked(trial)), [0.0]
    count = len(left)
    for attempt in range(_ATTEMPTS):
        found, scale = gradient(trial)
        outcomes = {name: _mismatch(trial, name, found[name], scale, number, attempt) for name in left}
        errors += [outcome for outcome in outcomes.values() if isinstance(outcome, float)]
        wrong = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, tuple)}
        if not wrong:
            return f"{count} tensors, largest relative error {max(errors):.0e}"
        left = list(wrong)
        if attempt < _ATTEMPTS - 1:
            trial.jitter(attempt)  # off a kink, if one lies here
    worst = max(wrong, key=lambda name: abs(wrong[name][0] - wrong[name][1]))
    others = f"\nSo are {len(wrong) - 1} more of {count}: {', '.join(left)}." if len(wrong) > 1 else ""
    raise PropertyError(_text(trial, worst, found[worst], wrong[worst], number, order) + others)


def _mismatch(
    trial: Trial, name: str, found: Tensor | None, scale: float, number: Callable[[Trial], float], seed: int
) -> float | tuple[float, float]:
    """Return the relative error, or the two derivatives where no step agrees."""
    variable = trial.variables()[name]
    direction = normal_like(variable, torch.Generator().manual_seed(seed))
    direction = direction / direction.norm()
    analytic = 0.0 if found is None else float((found * direction).sum())
    numeric = 0.0
    for step in _STEPS:
        numeric = _difference(variable, direction, step, lambda: number(trial))
        error, size = abs(analytic - numeric), max(abs(analytic), abs(numeric))
        if error <= _RELATIVE * size + 1e-9 * scale + 1e-14:
            return error / size if size > 1e-9 * scale else 0.0
    return analytic, numeric


def _difference(variable: Tensor, direction: Tensor, step: float, number: Callable[[], float]) -> float:
    """Central difference of fourth order."""
    slopes = []
    for length in (step, step / 2):
        values = [_moved(variable, direction * signed, number) for signed in (length, -length)]
        slopes.append((values[0] - values[1]) / (2 * length))
    return (4 * slopes[1] - slopes[0]) / 3


def _moved(variable: Tensor, shift: Tensor, number: Callable[[], float]) -> float:
    before = variable.detach().clone()
    try:
        variable.data.add_(shift)
        return number()
    finally:
        variable.data.copy_(before)


def _text(
    trial: Trial,
    name: str,
    found: Tensor | None,
    mismatch: tuple[float, float],
    number: Callable[[Trial], float],
    order: str,
) -> str:
    analytic, numeric = mismatch
    where = f"along a random direction of {name}"
    if found is None or not bool(found.count_nonzero()):
        kind = "is missing (None)" if found is None else "is exactly zero"
        what = "penalty" if order == "first" else "gradient"
        return (
            f"The {order} derivative with respect to {name} {kind}, but finite differences find {numeric:.6g} "
            f"{where}: the {what} "
            "does depend on it.\nUsually: a detach() or .data on the way, gradients without "
            "differentiable=True (create_graph=True), "
            "or a custom autograd.Function whose backward leaves the graph (once_differentiable, numpy)."
        )
    entry = _worst_entry(trial, name, found, number) if order == "first" else ""
    return (
        f"The {order} derivative {where} is {analytic:.8g}, finite differences give {numeric:.8g} (relative error "
        f"{abs(analytic - numeric) / max(abs(analytic), abs(numeric)):.1e}).{entry}\nUsually: one of several "
        f"paths is detached, a "
        "custom autograd.Function has a wrong backward, a value jumps here (argmax, rounding), or another call draws other "
        "random numbers."
    )


def _worst_entry(trial: Trial, name: str, found: Tensor, number: Callable[[Trial], float]) -> str:
    variable = trial.variables()[name]
    if variable.numel() > _FEW:
        return ""
    errors = []
    for index in range(variable.numel()):
        unit = torch.zeros_like(variable).flatten()
        unit[index] = 1
        numeric = _difference(variable, unit.view_as(variable), 1e-4, lambda: number(trial))
        errors.append((abs(float(found.flatten()[index]) - numeric), index, numeric))
    _, index, numeric = max(errors)
    place = [int(i) for i in torch.unravel_index(torch.tensor(index), variable.shape)]
    return f" Worst at {name}{place}: {float(found.flatten()[index]):.8g}, expected {numeric:.8g}."


def _checked(trial: Trial) -> dict[str, Tensor]:
    variables = trial.variables()
    if not variables:
        raise NotApplicable("nothing requires grad")
    return variables


def _norm(gradients: Gradients) -> float:
    return math.sqrt(sum(_squares(gradients)))


def _squares(gradients: Gradients) -> Iterator[float]:
    return (float(gradient.detach().square().sum()) for gradient in gradients.values() if gradient is not None)
