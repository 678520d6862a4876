"""Whether heads are the same function of their tensors, so that one vmapped pass can run them all."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_NOT_SETTINGS = frozenset(vars(nn.Module()))

# Modules whose batching rule warns or draws wrong numbers in torch 2.13; a loop serves them
_NO_BATCHING = (nn.PReLU, nn.RReLU)

Walked = list[tuple[str, nn.Module]]


def heads_differ(walked: list[Walked]) -> str | None:
    """Say why the heads, given as walked, cannot share one vmapped pass, or None where they can.

    Equal are heads of the same classes with the same settings, the same shapes and the same ties. What cannot be compared,
    hooks, and buffers that a forward may write to count as different: a loop is always right. This runs in every forward,
    since settings may change between two.
    """
    first = walked[0]
    for name, module in first:
        if isinstance(module, _NO_BATCHING):
            return f"head 0 has a {type(module).__name__} in {name or 'itself'!r}, which torch batches badly"
        if _hooked(module):
            return f"head 0 has a hook on {name or 'itself'!r}"
        if module._buffers and (module.training or not isinstance(module, nn.modules.batchnorm._BatchNorm)):
            return f"head 0 has buffers in {name or 'itself'!r}, which its forward may write to"
    ties = _ties(first)
    settings = [
        [(key, value) for key, value in vars(module).items() if key not in _NOT_SETTINGS] for _, module in first
    ]
    for position, others in enumerate(walked[1:], 1):
        if len(others) != len(first) or _ties(others) != ties:
            return f"heads 0 and {position} have different modules or ties"
        for (name, module), (other_name, other), own in zip(first, others, settings, strict=True):
            if name != other_name or not _same(module, other, own):
                return f"heads 0 and {position} differ in {other_name or 'their class'!r}"
    return None


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def head_tensors(walked: Walked) -> dict[str, Tensor]:
    """Return the parameters and buffers of a head by their first names."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in walked:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def _ties(modules: Walked) -> list[int]:
    """Return for every tensor the place of its first occurrence."""
    first: dict[int, int] = {}
    tensors = [t for _, module in modules for kind in (module._parameters, module._buffers) for t in kind.values()]
    return [first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]


def _same(module: nn.Module, other: nn.Module, settings: list[tuple[str, Any]]) -> bool:
    if module is other:
        return True
    if type(module) is not type(other) or module.training != other.training or _hooked(other):
        return False
    for mine, theirs in ((module._parameters, other._parameters), (module._buffers, other._buffers)):
        if mine.keys() != theirs.keys():
            return False
        for a, b in zip(mine.values(), theirs.values(), strict=True):
            if a is None or b is None:
                if a is not b:
                    return False
            elif a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
                return False
    others = vars(other)
    if len(others) != len(vars(module)):
        return False
    return all(key in others and _equal(value, others[key]) for key, value in settings)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b)
    except (RuntimeError, ValueError, TypeError):
        return False
