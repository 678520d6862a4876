"""Whether heads are the same function of their parameters, so that one vmapped pass can run them all."""

from __future__ import annotations

from typing import Any

from torch import nn

_TENSORS = ("_parameters", "_buffers")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_NOT_SETTINGS = frozenset(vars(nn.Module()))


def heads_differ(heads: nn.ModuleList) -> str | None:
    """Say why the heads cannot share one vmapped pass, or None where they can.

    Equal are heads of the same classes with the same settings and the same shapes. What cannot be compared, hooks, and
    buffers that a forward may write to count as different: a loop is always right.
    """
    first = list(heads[0].named_modules())
    for name, module in first:
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return f"head 0 has a hook on {name or 'itself'!r}"
        if module._buffers and (module.training or not isinstance(module, nn.modules.batchnorm._BatchNorm)):
            return f"head 0 has buffers in {name or 'itself'!r}, which its forward may write to"
    for position in range(1, len(heads)):
        others = list(heads[position].named_modules())
        if len(others) != len(first):
            return f"heads 0 and {position} have different modules"
        for (name, module), (other_name, other) in zip(first, others, strict=True):
            if name != other_name or not _same(module, other):
                return f"heads 0 and {position} differ in {other_name or 'their class'!r}"
    return None


def _same(module: nn.Module, other: nn.Module) -> bool:
    if type(module) is not type(other) or module.training != other.training:
        return False
    if any(getattr(other, hooks) for hooks in _HOOKS):
        return False
    for kind in _TENSORS:
        mine, theirs = getattr(module, kind), getattr(other, kind)
        if mine.keys() != theirs.keys():
            return False
        for a, b in zip(mine.values(), theirs.values(), strict=True):
            if (a is None) != (b is None):
                return False
            if a is not None and (a.shape != b.shape or a.dtype != b.dtype or a.device != b.device):
                return False
    mine, theirs = vars(module), vars(other)
    if mine.keys() != theirs.keys():
        return False
    return all(_equal(value, theirs[name]) for name, value in mine.items() if name not in _NOT_SETTINGS)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b)
    except (RuntimeError, ValueError, TypeError):
        return False
