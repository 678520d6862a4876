"""Classing a recorded operation at the inputs that it saw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradreg.engine._curvature import LINEAR, PIECEWISE, Curvature, curvature
from gradreg.engine._record import Call, is_differentiable
from gradreg.model import allowed_attention_kernels


def probe(call: Call, active: list[int], *, verify: int = 0) -> Curvature:
    """Return the class of a recorded operation.

    Args:
        call: The operation.
        active: Which of its differentiable arguments to differentiate; none: all that are no parameters.
        verify: As for `curvature`.

    Returns:
        The class. A choice made by values that are differentiated (a mask, an index) counts as piecewise linear.
    """
    leaves, structure = pytree.tree_flatten(call.args)
    floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and is_differentiable(leaf)]
    places = [floats[i] for i in active] or [i for i in floats if not isinstance(leaves[i], nn.Parameter)]
    if not places:
        return Curvature(LINEAR)

    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for position, graded in zip(tensors, call.graded, strict=True):
        if graded and not leaves[position].requires_grad:
            leaves[position] = leaves[position].detach().requires_grad_()

    def run(points: list[Tensor]) -> list[Tensor]:
        given = list(leaves)
        for position, point in zip(places, points, strict=True):
            given[position] = point
        args, kwargs = pytree.tree_unflatten(given, structure)
        with allowed_attention_kernels(call.kernels):
            return _differentiable(call.run(*args, **kwargs))

    found = curvature(run, [leaves[i] for i in places], verify=verify)
    return Curvature(PIECEWISE, found.zero_share) if found.kind == LINEAR and call.selects else found


def _differentiable(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(output)
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and is_differentiable(leaf)]
    return [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in found]
