"""Do the scores sum to the change of the target? If not, why, and what helps."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from gradreg.attribution._assemble import over_units
from gradreg.attribution._path import Path
from gradreg.attribution._result import Attribution
from gradreg.errors import AttributionWarning, warn

__all__ = ["check_complete"]


def normalizes(model: nn.Module) -> bool:
    """Whether a module of the model is called a normalization of single vectors."""
    names = (type(module).__name__.lower() for module in model.modules())
    return any("norm" in name and "batchnorm" not in name for name in names)


def check_complete(
    result: Attribution,
    error: Tensor,
    scalars: Tensor,
    path: Path,
    model: nn.Module,
    tolerance: float,
    log_spaced: bool,
) -> Attribution:
    """Return the result with its error, at least |delta|; warn where completeness fails.

    Args:
        result: Scores with `delta` and `change`.
        error: The estimate from two rules.
        scalars: f(x), of the shape of `delta`.
        path: Where the points are.
        model: What was attributed.
        tolerance: What share of the sum of absolute scores may be missing.
        log_spaced: Whether points are spaced logarithmically already.
    """
    if result.delta is None or result.change is None:
        return result
    delta, change = result.delta.detach(), result.change.detach()
    absolute = {key: scores.detach().abs() for key, scores in result.by_key.items()}
    mass = torch.maximum(over_units(absolute, delta, "sum"), change.abs().to(delta))
    size = torch.maximum(mass, scalars.detach().abs().to(delta))  # what f(x) - f(b) is rounded at
    rounding = 100 * torch.finfo(delta.dtype).eps * size.clamp(min=1e-30)
    short = delta.abs() > tolerance * mass + rounding
    if bool(short.any()):
        worst = float((delta.abs() / mass.clamp(min=1e-30))[short].max())
        warn(
            f"Completeness fails for {int(short.sum())} of {delta.numel()} targets: scores miss f(x) - f(b) by up to "
            f"{100 * worst:.2g} % of the sum of their absolute values. {_reason(path, model, log_spaced)}",
            AttributionWarning,
        )
    return replace(result, error=torch.maximum(error.detach(), delta.abs()))


def _reason(path: Path, model: nn.Module, log_spaced: bool) -> str:
    if any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        for module in model.modules()
    ):
        return "Dropout is active, so that every point is another function: call model.eval() first."
    zero = [
        key
        for key, starts in path.starts.items()
        if starts.dim() > 2
        and bool(((starts == 0).flatten(3).all(-1) if starts.dim() > 3 else (starts == 0).all(-1)).any())
    ]
    if zero and normalizes(model) and not log_spaced:
        return (
            f"The baseline of {zero[0]!r} holds vectors of zeros. A normalization layer (LayerNorm, RMSNorm) makes a vector "
            "that is scaled towards zero constant, except within about sqrt(eps) of zero, where the gradient is a spike "
            "that the points miss. Use another baseline, mean_embedding() or token_baseline(id), or rule='log', whose "
            "points crowd there."
        )
    return (
        "Ask for more points (n_steps='auto' or larger). At kinks such as those of ReLU the error falls slowly and not "
        "steadily: a few points more or less may help as well; `error` tells."
    )
