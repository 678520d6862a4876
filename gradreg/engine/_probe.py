"""Classing a recorded operation at the inputs that it saw."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from gradreg.engine._curvature import LINEAR, PIECEWISE, Curvature, curvature
from gradreg.engine._record import Call
from gradreg.model import allowed_attention_kernels


def probe(call: Call, active: list[int], *, verify: int = 0) -> Curvature:
    """Return the class of a recorded operation.

    Args:
        call: The operation.
        active: Which of its floating-point arguments to differentiate; none: all that are no parameters.
        verify: As for `curvature`.

    Returns:
        The class. A choice made by values that are differentiated (a mask, an index) counts as piecewise linear.
    """
    leaves, structure = pytree.tree_flatten(call.args)
    floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    places = [floats[i] for i in active] or [i for i in floats if not leaves[i].requires_grad]
    if not places:
        return Curvature(LINEAR)

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
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())]
