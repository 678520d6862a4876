"""Evaluating `of` on captured outputs, one head at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from gradreg.batch import Batch
from gradreg.errors import GradregError
from gradreg.model import VMAP_FROM
from gradreg.scalars import AcrossHeads, ScalarFunction, check_scalar


def map_heads(function: Callable[[Any], Tensor], outputs: Any, heads: int, axis: int) -> Tensor:
    """Apply a function to the outputs of every head, `[n, ...]` each, and stack the results at an axis.

    Args:
        function: From one head's outputs to a tensor.
        outputs: Outputs of all heads, `[n, K, ...]` in every tensor.
        heads: K.
        axis: Where the heads go in the result.

    Returns:
        The stacked results.
    """
    if isinstance(outputs, Tensor) and heads < VMAP_FROM:
        return torch.stack([function(own) for own in (outputs[:, k] for k in range(heads))], axis)
    leaves, structure = pytree.tree_flatten(outputs)

    def one(*own: Any) -> Tensor:
        return function(pytree.tree_unflatten(list(own), structure))

    if heads >= VMAP_FROM:
        axes = tuple(1 if isinstance(leaf, Tensor) else None for leaf in leaves)
        try:
            values: Tensor = vmap(one, in_dims=axes, out_dims=axis, randomness="different")(*leaves)
        except GradregError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            pass  # a function that vmap refuses; a genuine fault is raised again below
        else:
            return values
    columns = [one(*(leaf[:, k] if isinstance(leaf, Tensor) else leaf for leaf in leaves)) for k in range(heads)]
    return torch.stack(columns, axis)


def check_targets(of: ScalarFunction, outputs: Any, batch: Batch) -> None:
    """Let a scalar look at all targets of a batch, outside of any transform, before it is evaluated."""
    check = getattr(of, "check_targets", None)
    if check is not None:
        check(outputs, batch)


def evaluate_checked(of: ScalarFunction, outputs: Any, batch: Batch, heads: int | None) -> Tensor:
    """Return what `evaluate` does; targets are looked at first where no kernel refuses them: on other devices and under vmap.

    On the CPU torch refuses wrong labels itself, and looking at them costs as much as a small layer: they are then looked at
    for the sake of the message.
    """
    on_cpu = not isinstance(batch.targets, Tensor) or batch.targets.device.type == "cpu"
    if not on_cpu or (heads or 0) >= VMAP_FROM:
        check_targets(of, outputs, batch)
        return evaluate(of, outputs, batch, heads)
    try:
        return evaluate(of, outputs, batch, heads)
    except (IndexError, RuntimeError):
        check_targets(of, outputs, batch)
        raise


def evaluate(of: ScalarFunction, outputs: Any, batch: Batch, heads: int | None) -> Tensor:
    """Return the scalars: `[n, *targets]`, with heads `[n, K, *targets]`; `of` is given one head's outputs.

    Args:
        of: The scalar.
        outputs: Outputs of the model.
        batch: The batch that `of` reads.
        heads: The number of heads, or None.

    Returns:
        The values, checked to be floating point with the example first.
    """
    n = len(batch)
    if heads is None or isinstance(of, AcrossHeads):
        return check_scalar(of(outputs, batch), n, of)
    if isinstance(outputs, Tensor) and getattr(of, "takes_all_heads", lambda dim: False)(outputs.dim()):
        return check_scalar(of(outputs, batch), n, of)
    return map_heads(lambda own: check_scalar(of(own, batch), n, of), outputs, heads, axis=1)
