"""Which nodes of a graph use a parameter, and whether some may move examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction


def now() -> int:
    """Return the number that the next node of the graph will get; nodes are numbered in the order of their making."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


# What puts entries in other places, many by the values of indices: routing to experts, sorting by length
_MOVING = (
    "Index",
    "Gather",
    "Scatter",
    "Sort",
    "Topk",
    "Masked",
    "Take",
    "Put",
    "Stack",
    "Unbind",
    "Split",
    "Flip",
    "Roll",
)


def consumers(scalars: Tensor, parameters: Mapping[str, nn.Parameter]) -> tuple[dict[str, list[int]], bool]:
    """Return, for every parameter, the numbers of the nodes of the graph of `scalars` that read it.

    And whether the graph has nodes that may move examples to other places, which places depending on the data.
    """
    moving = False
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, list[int]] = {name: [] for name in parameters}
    root = scalars.grad_fn
    seen = {root}
    stack: list[Any] = [] if root is None else [root]
    while stack:
        node = stack.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if not child.next_functions:  # a leaf
                name = names.get(id(getattr(child, "variable", None)))
                if name is not None:
                    found[name].append(node._sequence_nr())
            elif child not in seen:
                seen.add(child)
                moving = moving or child.name().startswith(_MOVING) or isinstance(child, BackwardCFunction)
                stack.append(child)
    return found, moving


def within(numbers: Iterable[int], start: int, end: int) -> bool:
    """Whether any of the numbers lies in `[start, end)`."""
    return any(start <= number < end for number in numbers)
