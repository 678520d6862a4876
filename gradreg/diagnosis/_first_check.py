"""The cheap check at the first call of a regularizer: what does its gradient do to the parameters?"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.diagnosis._causes import classed, merged
from gradreg.diagnosis._remedies import SMOOTH
from gradreg.diagnosis._report import Cause
from gradreg.engine import PIECEWISE, Call, grad_mode, parameter_gradients, recorded
from gradreg.errors import CompatibilityError, DetachedGradientError, ZeroSecondDerivativeWarning, warn
from gradreg.model import SharedBase, call, devices_of, differentiable_kernels, preserved, unwrap

_FEW = 2
"""Examples on which the operations of a silent path are looked at: a small part of one forward of the batch."""


def first_check(name: str, model: nn.Module, batch: Batch, penalty: Tensor) -> None:
    """Warn where a penalty sends exactly nothing to a whole part of the model.

    Costs one backward of the penalty; only where there is something to warn of, operations are classed by their own second
    derivatives on two examples. `check_double_backward` measures the rest. The parts are the base of a `SharedBase`, and the
    model as a whole. Single parameters without gradient are normal (biases of ReLU networks, the last bias) and raise no alarm.

    Args:
        name: How messages call the penalty.
        model: The model.
        batch: The batch; inputs that require grad are trained themselves (generators, images).
        penalty: Its value, with graph.

    Raises:
        DetachedGradientError: If the penalty carries no graph though parameters are trained.
        CompatibilityError: If no parameter requires grad and nothing else does.
    """
    inner = unwrap(model)
    trained = {key for key, parameter in inner.named_parameters() if parameter.requires_grad}
    if not torch.is_grad_enabled() and not penalty.requires_grad:
        return
    if not trained and not batch.requires_grad:
        raise CompatibilityError(
            f"No parameter of the {type(inner).__name__} requires grad, so {name} cannot be trained on. Unfreeze "
            "parameters (requires_grad_(True)), or evaluate under torch.no_grad()."
        )
    if not penalty.requires_grad:
        raise DetachedGradientError(
            f"{name} carries no graph: adding it to a loss changes nothing. Gradients that are detached, or taken without "
            "differentiable=True, do this; so do linear models, whose gradients with respect to inputs are constants."
        )
    found = parameter_gradients(penalty, inner)
    reached = {key for key, gradient in found.items() if gradient is not None and bool(gradient.count_nonzero())}
    if isinstance(inner, SharedBase):
        # names of the base's parameters, also where a parameter is tied to one of the heads
        base = {f"base.{key}" for key, parameter in inner.base.named_parameters() if parameter.requires_grad} & trained
        if base and not base & reached and trained & reached:
            warn(_base_text(name, inner, batch, found, base), ZeroSecondDerivativeWarning)
            return
    if trained and not reached:
        warn(
            f"{name} sends exactly zero to every parameter of the {type(inner).__name__} on this batch.{_culprits(inner, batch)}",
            ZeroSecondDerivativeWarning,
        )


def _base_text(name: str, model: SharedBase, batch: Batch, found: dict[str, Tensor | None], base: set[str]) -> str:
    kind = "is disconnected from" if all(found[key] is None for key in base) else "sends exactly zero to"
    return (
        f"{name} {kind} the base: its {len(base)} trainable parameters ({', '.join(sorted(base)[:3])}, ...) hear nothing of it, "
        f"because the heads have no second derivative with respect to the features.{_culprits(model, batch, 'heads.')} If the "
        "base is meant to stay as it is, freeze it (requires_grad_(False))."
    )


def _culprits(model: nn.Module, batch: Batch, prefix: str = "") -> str:
    names = [f"{cause.name} ({cause.kind})" for cause in _piecewise(model, batch, prefix)]
    if not names:
        return " The path is linear: no operation on it has a second derivative."
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" Piecewise linear: {', '.join(names[:3])}{rest}. {SMOOTH[0].upper()}{SMOOTH[1:]}"


def _piecewise(model: nn.Module, batch: Batch, prefix: str) -> list[Cause]:
    """Return the piecewise-linear operations of a forward of a few examples, under names that begin with a prefix."""
    few = batch[:_FEW]
    with grad_mode(), preserved(model, devices_of(model)), differentiable_kernels(model, twice=True):
        with recorded(model) as record, suppress(Exception):  # a model that does not take a part of a batch
            call(model, few)
        seen: list[tuple[Call, list[int]]] = [
            (one, []) for one in record.calls if one.name.startswith(prefix) and not one.outside
        ]
        return merged(one.cause() for one in classed(seen) if one.curvature == PIECEWISE)
