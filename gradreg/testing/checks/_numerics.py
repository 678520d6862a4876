"""Finite and close everywhere: lower precision, a single example, vanishing gradients."""

from __future__ import annotations

import torch

from gradreg.errors import GradregError
from gradreg.testing.checks._report import NotApplicable, PropertyError
from gradreg.testing.checks._trial import Subject, Trial, demand

_NORM = (
    "Usually: the norm of a zero vector, whose derivative is 0/0. Put eps inside the root, sqrt(sum(g^2) + "
    "eps), or use the squared "
    "norm; a `where` after the division comes too late."
)
_UNSUPPORTED = ("not implemented for", "not supported", "not implemented", "unsupported")


def float32(subject: Subject) -> str:
    """In float32 it runs, stays float32, and agrees with float64 to three digits."""
    return _lower(subject, torch.float32, 1e-3)


def bfloat16(subject: Subject) -> str:
    """In bfloat16 value and gradients are finite, where the model runs in it at all."""
    return _lower(subject, torch.bfloat16, None)


def single_example(subject: Subject) -> str:
    """One example alone gives a finite value and finite gradients, or a clear `GradregError`."""
    trial = subject.trial()
    trial.batch = trial.batch[:1]
    try:
        _finite(trial, "on a single example", "Usually: a variance with n - 1, or an empty group or pair.")
    except GradregError as refusal:
        return f"refused: {str(refusal)[:80]}"
    return "finite"


def zero_gradients(subject: Subject) -> str:
    """Where all weights are zero, so that outputs are constant and gradients vanish, value and gradients are finite."""
    trial = subject.trial()
    with torch.no_grad():
        for parameter in trial.model.parameters():
            parameter.zero_()
    try:
        outputs = trial.forward()
    except Exception as problem:
        raise NotApplicable(f"the model itself cannot be run with zero weights ({problem})") from problem
    tensors: list[torch.Tensor] = []
    torch.utils._pytree.tree_map_only(torch.Tensor, tensors.append, outputs)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise NotApplicable("the model's own outputs are not finite with zero weights")
    try:
        _finite(trial, "with constant outputs (all weights zero)", _NORM)
    except GradregError as refusal:
        return f"refused: {str(refusal)[:80]}"
    return "finite"


def _lower(subject: Subject, dtype: torch.dtype, tolerance: float | None) -> str:
    name = str(dtype).removeprefix("torch.")
    trial = subject.trial(dtype)
    try:
        trial.forward()
    except RuntimeError as problem:
        raise NotApplicable(
            f"the model alone does not run in {name} ({str(problem).splitlines()[0][:80]})"
        ) from problem
    exact = subject.trial().number()
    try:
        value = trial.value()
        found = float(value.detach())
        _finite(trial, f"in {name}", "Usually: an overflow, or an eps below the resolution of the dtype.")
    except RuntimeError as problem:
        text = str(problem).splitlines()[0]
        if tolerance is None and any(words in text for words in _UNSUPPORTED):
            raise NotApplicable(f"torch has no kernel in {name} ({text[:80]})") from problem
        raise PropertyError(
            f"In {name} it raises {type(problem).__name__}: {text}\nUsually: a tensor made with a fixed dtype "
            f"(torch.zeros(...), "
            "a float32 constant) meets others; take dtype and device from the gradients."
        ) from problem
    if tolerance is None:
        return f"finite ({found:.4g}; float64 {exact:.4g})"
    demand(
        abs(found - exact) <= tolerance * abs(exact) + 1e-6,
        f"In {name} the value is {found:.6g}, in float64 {exact:.6g} (relative "
        f"{abs(found - exact) / max(abs(exact), 1e-300):.1e})."
        "\nUsually: a difference of large numbers, or an eps below the resolution of the dtype.",
    )
    return f"relative error {abs(found - exact) / max(abs(exact), 1e-300):.0e}"


def _finite(trial: Trial, when: str, cause: str) -> None:
    value = trial.number()
    demand(value == value and abs(value) != float("inf"), f"The value is {value} {when}.\n{cause}")
    for name, gradient in trial.gradient().items():
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            count = int((~torch.isfinite(gradient)).sum())
            raise PropertyError(
                f"The gradient of {name} has {count} entries of {gradient.numel()} that are not finite {when}.\n{cause}"
            )
