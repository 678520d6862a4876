"""The cheap check at the first call of a regularizer: what does its gradient do to the parameters?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import parameter_gradients
from gradreg.errors import CompatibilityError, DetachedGradientError, ZeroSecondDerivativeWarning, warn
from gradreg.model import SharedBase, unwrap

# Activations whose second derivative is zero almost everywhere
PIECEWISE_LINEAR = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.ReLU6,
    nn.Threshold,
    nn.Hardtanh,
    nn.Hardshrink,
    nn.Softshrink,
)


def first_check(name: str, model: nn.Module, batch: Batch, penalty: Tensor) -> None:
    """Warn where a penalty sends exactly nothing to a whole part of the model.

    Costs one backward of the penalty. The parts are the base of a `SharedBase`, and the model as a whole. Single parameters
    without gradient are normal (biases of ReLU networks, the last bias) and raise no alarm.

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
            warn(_base_text(name, inner, found, base), ZeroSecondDerivativeWarning)
            return
    if trained and not reached:
        warn(
            f"{name} sends exactly zero to every parameter of the {type(inner).__name__} on this batch.{_culprits(inner)}",
            ZeroSecondDerivativeWarning,
        )


def _base_text(name: str, model: SharedBase, found: dict[str, Tensor | None], base: set[str]) -> str:
    kind = "is disconnected from" if all(found[key] is None for key in base) else "sends exactly zero to"
    return (
        f"{name} {kind} the base: its {len(base)} trainable parameters ({', '.join(sorted(base)[:3])}, ...) hear nothing of it, "
        f"because the heads have no second derivative with respect to the features.{_culprits(model.heads, 'heads.')} If the "
        "base is meant to stay as it is, freeze it (requires_grad_(False))."
    )


def _culprits(module: nn.Module, prefix: str = "") -> str:
    names = [
        f"{prefix}{key} ({type(child).__name__})"
        for key, child in module.named_modules()
        if isinstance(child, PIECEWISE_LINEAR)
    ]
    if not names:
        return " No piecewise-linear activation module is there: the path is linear, or uses functional ones."
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f" Piecewise linear: {', '.join(names[:3])}{rest}. Use a smooth activation there: nn.Softplus(beta=10), nn.GELU(), "
        "nn.SiLU(), nn.ELU() or nn.Tanh()."
    )
