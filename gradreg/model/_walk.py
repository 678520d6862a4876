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
        if current._modules:
            dotted = f"{prefix}." if prefix else ""
            stack += [(dotted + name, child) for name, child in reversed(current._modules.items()) if child is not None]
    return found


def any_trainable(module: nn.Module) -> bool:
    """Whether any parameter requires grad."""
    stack = [module]
    while stack:
        current = stack.pop()
        if any(tensor is not None and tensor.requires_grad for tensor in current._parameters.values()):
            return True
        stack += [child for child in current._modules.values() if child is not None]
    return False


def all_modules(module: nn.Module) -> list[nn.Module]:
    """Return every module once, in no particular order."""
    found: dict[int, nn.Module] = {}
    stack = [module]
    while stack:
        current = stack.pop()
        if id(current) not in found:
            found[id(current)] = current
            stack += [child for child in current._modules.values() if child is not None]
    return list(found.values())
