"""The rule for any module: the pullback of the module alone, one example at a time under vmap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils import _pytree as pytree

from gradreg.engine._vmapped import VMAP_FAULTS
from gradreg.engine.factors._axes import CallAxes
from gradreg.engine.factors._pieces import Piece, dense
from gradreg.engine.factors._record import Call
from gradreg.model import differentiable_kernels, swapped


def local_pieces(
    call: Call,
    axes: CallAxes,
    gradients: Mapping[int, Tensor],
    parameters: Mapping[str, Tensor],
    looped: set[tuple[str, int]],
) -> dict[str, Piece]:
    """Return per-example gradients of one call of a module.

    Args:
        call: The call.
        axes: Where its examples are.
        gradients: At the leaves of its output, by their position.
        parameters: By their name inside the module.
        looped: Calls that vmap is known to refuse; this one is added if it does.

    Returns:
        Pieces by the same names, one row per place of the axis of examples.
    """
    module = call.module
    batched = [i for i, axis in enumerate(axes.inputs) if axis is not None]
    positions = list(gradients)
    places = [axes.inputs[i].position for i in batched]  # type: ignore[union-attr]  # not None there
    ends = [axes.outputs[i].position for i in positions]  # type: ignore[union-attr]  # outputs with gradients have an axis
    detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in call.inputs]

    def pulled(values: dict[str, Tensor], *rows: Tensor) -> dict[str, Tensor]:
        leaves = list(detached)
        for i, place, row in zip(batched, places, rows[: len(batched)], strict=True):
            leaves[i] = row.unsqueeze(place).clone()  # of its own: the module may work in place
        args, kwargs = pytree.tree_unflatten(leaves, call.structure)

        def function(own: dict[str, Tensor]) -> list[Tensor]:
            with swapped(module, own):
                found = pytree.tree_leaves(module(*args, **kwargs))
            return [found[i] for i in positions]

        outputs, pullback = vjp(function, values)[:2]
        at = [
            row.unsqueeze(end).to(output) for row, end, output in zip(rows[len(batched) :], ends, outputs, strict=True)
        ]
        found: dict[str, Tensor] = pullback(at)[0]
        return found

    values = {name: parameter.detach() for name, parameter in parameters.items()}
    tensors = [*(detached[i] for i in batched), *gradients.values()]
    with torch.no_grad(), differentiable_kernels(module, twice=True):
        if call.key not in looped:
            try:
                in_dims = (None, *places, *ends)
                found = vmap(pulled, in_dims=in_dims, randomness="different")(values, *tensors)
                return {name: dense(value) for name, value in found.items()}
            except VMAP_FAULTS:
                looped.add(call.key)  # a fault of the module itself is raised again below
        found = _looped(module, call, detached, batched, places, gradients, ends, parameters)
    return {name: dense(value) for name, value in found.items()}


def _looped(
    module: nn.Module,
    call: Call,
    leaves: list[Any],
    batched: list[int],
    places: list[int],
    gradients: Mapping[int, Tensor],
    ends: list[int],
    parameters: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Run the module on one example after the other, for modules that vmap refuses (recurrent ones)."""
    columns: list[tuple[Tensor, ...]] = []
    names = list(parameters)
    for row in range(leaves[batched[0]].shape[places[0]]):
        own = list(leaves)
        for i, place in zip(batched, places, strict=True):
            own[i] = leaves[i].narrow(place, row, 1).clone()
        args, kwargs = pytree.tree_unflatten(own, call.structure)
        with torch.enable_grad():
            found = pytree.tree_leaves(module(*args, **kwargs))
            at = [gradient.narrow(end, row, 1) for gradient, end in zip(gradients.values(), ends, strict=True)]
            wanted = [parameters[name] for name in names]
            columns.append(
                torch.autograd.grad(
                    [found[i] for i in gradients], wanted, at, allow_unused=True, materialize_grads=True
                )
            )
    return {name: torch.stack([column[i] for column in columns]) for i, name in enumerate(names)}
