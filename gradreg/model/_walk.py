"""Walking a module tree, several times faster than `named_modules`, which yields through one generator per level."""

from __future__ import annotations

from torch import nn


def walk(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module once with its first dotted name, the module itself first (as `""`), in depth-first order."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", module)]
    while stack:
        prefix, current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        found.append((prefix, current))
        children = [
            (f"{prefix}.{name}" if prefix else name, child)
            for name, child in current._modules.items()
            if child is not None
        ]
        stack.extend(reversed(children))
    return found
