"""Whether a normalization over the batch lies between what is differentiated and with respect to what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gradreg.errors import CoupledExamplesError


def check_uncoupled(scalar: Tensor, points: Iterable[Tensor], normalized: dict[Any, str], what: str) -> None:
    """Refuse per-example gradients where train-mode BatchNorm lies between `points` and `scalar`.

    Args:
        scalar: The scalars, with their graph.
        points: The tensors to differentiate with respect to.
        normalized: From the graph node of every train-mode BatchNorm output to the module's name.
        what: How the message calls the points.

    Raises:
        CoupledExamplesError: If one lies between; the modules are named.
    """
    if not normalized or scalar.grad_fn is None:
        return
    targets = {_node(point) for point in points}
    between = nodes_between(scalar.grad_fn, targets)
    names = list(dict.fromkeys(name for node, name in normalized.items() if node in between))
    if names:
        raise CoupledExamplesError(
            f"BatchNorm in train mode lies between {what} and `of` ({', '.join(map(repr, names))}): every example's output then "
            "depends on the whole batch, and a per-example gradient does not exist. Put these modules in eval mode "
            "(module.eval()), or use GroupNorm."
        )


def _node(tensor: Tensor) -> Any:
    return tensor.grad_fn if tensor.grad_fn is not None else ("leaf", id(tensor))


def nodes_between(start: Any, targets: set[Any]) -> set[Any]:
    """Return the nodes of the graph from `start` down from which a target is reached."""
    reaches: dict[Any, bool] = {}
    stack = [(start, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            leaf = getattr(node, "variable", None)
            hit = node in targets or (leaf is not None and ("leaf", id(leaf)) in targets)
            reaches[node] = hit or any(
                reaches.get(child, False) for child, _ in node.next_functions if child is not None
            )
            continue
        if node in reaches:
            continue
        reaches[node] = False
        stack.append((node, True))
        if node not in targets:
            stack.extend(
                (child, False) for child, _ in node.next_functions if child is not None and child not in reaches
            )
    return {node for node, hit in reaches.items() if hit and node not in targets}
