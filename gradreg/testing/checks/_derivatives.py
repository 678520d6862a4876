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
_DIRECTIONS = 3
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
    """`torch.autograd.gradgradcheck` in fast mode passes, at a nearby point if a kink lies at this one.

    It moves all parameters together along three random directions: one small variable costs less than one per tensor.
    """
    trial = subject.trial()
    names = [name for name, parameter in trial.model.named_parameters() if parameter.requires_grad]
    if not names:
        raise NotApplicable("no parameter requires grad")
    generator = torch.Generator().manual_seed(0)
    start = {name: trial.model.get_parameter(name) for name in names}
    directions = {
        name: torch.stack([normal_like(parameter, generator) for _ in range(_DIRECTIONS)])
        for name, parameter in start.items()
    }

    def value(steps: Tensor) -> Tensor:
        moved = {name: p + torch.tensordot(steps, directions[name].detach(), 1) for name, p in start.items()}
        with swapped(trial.model, moved):
            return trial.value()

    for attempt in range(_ATTEMPTS):
        try:
            gradgradcheck(value, torch.zeros(_DIRECTIONS, dtype=torch.float64, requires_grad=True), fast_mode=True)
        except RuntimeError as problem:
            if attempt == _ATTEMPTS - 1:
                raise PropertyError(f"torch says: {str(problem).strip()[:300]}") from problem
            trial.jitter(attempt)
        else:
            break
    return f"{_DIRECTIONS} directions of {len(names)} tensors"


def _compare(
    subject: Subject,
    gradient: Callable[[Trial], tuple[Gradients, float]],
    number: Callable[[Trial], float],
    order: str,
) -> str:
    trial = subject.trial()
    left = list(_checked(trial))
    count = len(left)
    for attempt in range(_ATTEMPTS):
        found, scale = gradient(trial)
        if attempt == 0 and _agree_together(trial, found, scale, number):
            return f"{count} tensors"
        outcomes = {name: _mismatch(trial, name, found[name], scale, number, attempt) for name in left}
        wrong = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
        if not wrong:
            return f"{count} tensors"
        left = list(wrong)
        if attempt < _ATTEMPTS - 1:
            trial.jitter(attempt)  # off a kink, if one lies here
    worst = max(wrong, key=lambda name: abs(wrong[name][0] - wrong[name][1]))
    others = f"\nSo are {len(wrong) - 1} more of {count}: {', '.join(left)}." if len(wrong) > 1 else ""
    raise PropertyError(_text(trial, worst, found[worst], wrong[worst], number, order) + others)


def _agree_together(trial: Trial, found: Gradients, scale: float, number: Callable[[Trial], float]) -> bool:
    """Whether all tensors agree at once, which is cheap: along a direction to which each contributes alike.

    Those without a gradient make a second group, in which differences must vanish.
    """
    directions = {name: _direction(variable, found[name], 0) for name, variable in trial.variables().items()}
    shares = {name: _along(found[name], direction) for name, direction in directions.items()}
    largest = max(shares.values())
    target = max(min((share for share in shares.values() if share > 0), default=0.0), 1e-3 * largest)
    heard = {name: directions[name] * min(target / share, 1.0) for name, share in shares.items() if share > 0}
    silent = {name: directions[name] for name, share in shares.items() if not share > 0}
    for group, precision in ((heard, 1e-11), (silent, 1e-9)):
        analytic = math.fsum(_along(found[name], direction) for name, direction in group.items())
        if group and not any(
            _near(analytic, _difference(trial, group, step, number), precision * scale) for step in _STEPS
        ):
            return False
    return True


def _mismatch(
    trial: Trial, name: str, found: Tensor | None, scale: float, number: Callable[[Trial], float], seed: int
) -> tuple[float, float] | None:
    """Return the two derivatives along a direction of one tensor where they agree at no step."""
    direction = _direction(trial.variables()[name], found, seed)
    analytic, numeric = _along(found, direction), 0.0
    for step in _STEPS:
        numeric = _difference(trial, {name: direction}, step, number)
        if _near(analytic, numeric, 1e-9 * scale):
            return None
    return analytic, numeric


def _near(analytic: float, numeric: float, absolute: float) -> bool:
    return abs(analytic - numeric) <= _RELATIVE * max(abs(analytic), abs(numeric)) + absolute + 1e-14


def _direction(variable: Tensor, found: Tensor | None, seed: int) -> Tensor:
    """Return a unit vector, half random, half along the gradient."""
    direction = normal_like(variable, torch.Generator().manual_seed(seed))
    direction = direction / direction.norm().clamp(min=1e-300)
    if found is not None and bool(found.count_nonzero()):
        direction = direction + found.detach() / found.detach().norm()
    unit: Tensor = direction / direction.norm().clamp(min=1e-300)
    return unit


def _along(found: Tensor | None, direction: Tensor) -> float:
    return 0.0 if found is None else float((found.detach() * direction).sum())


def _difference(trial: Trial, directions: dict[str, Tensor], step: float, number: Callable[[Trial], float]) -> float:
    """Central difference of fourth order."""
    slopes = []
    for length in (step, step / 2):
        values = [_moved(trial, directions, signed, number) for signed in (length, -length)]
        slopes.append((values[0] - values[1]) / (2 * length))
    return (4 * slopes[1] - slopes[0]) / 3


def _moved(trial: Trial, directions: dict[str, Tensor], step: float, number: Callable[[Trial], float]) -> float:
    variables = trial.variables()
    before = {name: variables[name].detach().clone() for name in directions}
    try:
        for name, direction in directions.items():
            variables[name].data.add_(step * direction)
        return number(trial)
    finally:
        for name, value in before.items():
            variables[name].data.copy_(value)


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
        numeric = _difference(trial, {name: unit.view_as(variable)}, 1e-4, number)
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
