"""Collect the factors of a batch."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradreg.engine._gradients import gradients
from gradreg.engine.factors._factors import Coverage, Factors
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Params


def collect_factors(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Params | tuple[Params, ...],
    *,
    each_target: bool = False,
    randomness: str = "different",
) -> Factors:
    """Return the per-example parameter gradients of a batch as layer factors, by one forward and backward.

    Args:
        model: Any module.
        batch: What `as_batch` reads.
        of: The scalar per example, `[n]` or `[n, *targets]`.
        wrt: The parameters.
        each_target: Rows are (example, target), example-major, one backward per target; else targets are summed.
        randomness: As in `gradients`.
    """
    found = gradients(model, batch, of, wrt, randomness=randomness)
    shapes = {name: p.shape for name, p in model.named_parameters() if name in found}
    if each_target:
        rows = {name: value.reshape(-1, *shapes[name]) for name, value in found.items()}
    else:
        rows = {
            name: value.reshape(len(value), -1, *shapes[name]).sum(1) if value.dim() > len(shapes[name]) + 1 else value
            for name, value in found.items()
        }
    coverage = tuple(Coverage(name, shape.numel(), "gradients") for name, shape in shapes.items())
    return Factors(rows, coverage)
