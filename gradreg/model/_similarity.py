"""Whether heads are the same function of their tensors, so that one vmapped pass can run them all."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_IMMUTABLE = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = frozenset(vars(nn.Module())) - {"training"}
_NOT_SETTINGS = frozenset(vars(nn.Module()))

# Modules whose batching rule warns or draws wrong numbers in torch 2.13; a loop serves them
_NO_BATCHING = (nn.PReLU, nn.RReLU)


@dataclass
class Alignment:
    """Equal heads, tensor by tensor.

    Attributes:
        names: First names of the distinct parameters and buffers of a head.
        states: Per head its tensors, in the order of the names.
        in_place: Whether a module of a head announces that it works in place.
        live: Whether the tensors are the heads' own parameters, not stand-ins for the time of a call.
    """

    names: list[str]
    states: list[list[Tensor]]
    in_place: bool
    live: bool

    def stacked(self) -> dict[str, Tensor]:
        """Stack the live parameters; `torch.func.stack_module_state` would make new leaves and lose the gradient."""
        columns = zip(*self.states, strict=True)
        return {name: torch.stack(column) for name, column in zip(self.names, columns, strict=True)}


_KNOWN: WeakKeyDictionary[nn.ModuleList, tuple[_Snapshot, Alignment]] = WeakKeyDictionary()


class _Snapshot:
    """All entries that a comparison of heads looked at, so that a later forward can see in microseconds that none changed."""

    def __init__(self, heads: nn.ModuleList) -> None:
        self.heads = list(heads)
        self.types = [(module, type(module)) for head in heads for module in _modules(head)]
        modules = [module for head in heads for module in _modules(head)]
        tables = [
            table
            for module in modules
            for table in (vars(module), module._parameters, module._buffers, module._modules)
        ]
        self.sizes = [(table, len(table)) for table in tables]
        self.entries = [(table, key, value) for table in tables for key, value in table.items() if key not in _TABLES]
        self.empty = [getattr(module, hooks) for module in modules for hooks in _HOOKS]

    def holds(self, heads: nn.ModuleList) -> bool:
        """Whether everything is as it was."""
        return (
            len(heads) == len(self.heads)
            and all(own is known for own, known in zip(heads, self.heads, strict=True))
            and not any(self.empty)
            and all(type(module) is kind for module, kind in self.types)
            and all(len(table) == size for table, size in self.sizes)
            and all(table.get(key) is value for table, key, value in self.entries)
        )


def align(heads: nn.ModuleList) -> Alignment | str:
    """Return the heads aligned, or why they cannot share one vmapped pass.

    Equal are heads of the same classes with the same settings, the same shapes and the same ties. What cannot be compared,
    hooks, and buffers that a forward may write to count as different: a loop is always right. Every forward asks, since
    settings may change between two; equal heads are then recognized by a snapshot.
    """
    known = _KNOWN.get(heads)
    if known is not None and known[0].holds(heads):
        return known[1]
    aligned = _compared(heads)
    if isinstance(aligned, Alignment) and aligned.live:
        _KNOWN[heads] = (_Snapshot(heads), aligned)
    return aligned


def _compared(heads: nn.ModuleList) -> Alignment | str:
    first, names = _modules_and_names(heads[0])
    for module in first:
        if isinstance(module, _NO_BATCHING):
            return f"head 0 has a {type(module).__name__}, which torch batches badly"
        if hooked(module):
            return f"head 0 has a hook on its {type(module).__name__}"
        if module._buffers and (module.training or not isinstance(module, nn.modules.batchnorm._BatchNorm)):
            return f"head 0 has buffers in its {type(module).__name__}, which its forward may write to"
    settings = [[(key, value) for key, value in vars(module).items() if key not in _NOT_SETTINGS] for module in first]
    tensors = _tensors(first)
    ties = _ties(tensors)
    rows = [tensors]
    for position in range(1, len(heads)):
        others = _modules(heads[position])
        if len(others) != len(first):
            return f"heads 0 and {position} have different modules"
        for module, other, own in zip(first, others, settings, strict=True):
            if not _same(module, other, own):
                return f"heads 0 and {position} differ in their {type(module).__name__}"
        rows.append(_tensors(others))
        if not _same_tensors(tensors, rows[-1]) or _ties(rows[-1]) != ties:
            return f"heads 0 and {position} have different tensors"
    kept = [place for place, tensor in enumerate(tensors) if tensor is not None and ties[place] == place]
    return Alignment(
        [names[place] for place in kept],
        [[tensor for place in kept if (tensor := row[place]) is not None] for row in rows],
        any(getattr(module, "inplace", False) for module in first),
        all(isinstance(tensor, nn.Parameter) for row in rows for tensor in row if tensor is not None),
    )


def _modules(head: nn.Module) -> list[nn.Module]:
    """Return the modules depth first, one that is reused as often as it is used."""
    found, stack = [], [head]
    while stack:
        module = stack.pop()
        found.append(module)
        if module._modules:
            stack += [child for child in reversed(module._modules.values()) if child is not None]
    return found


def _modules_and_names(head: nn.Module) -> tuple[list[nn.Module], list[str]]:
    """Return the modules in the order of `_modules`, and the names of all their tensors."""
    found, names, stack = [], [], [("", head)]
    while stack:
        prefix, module = stack.pop()
        found.append(module)
        names += [prefix + name for kind in (module._parameters, module._buffers) for name in kind]
        children = [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
        stack += reversed(children)
    return found, names


def _tensors(modules: list[nn.Module]) -> list[Tensor | None]:
    return [tensor for module in modules for kind in (module._parameters, module._buffers) for tensor in kind.values()]


def _ties(tensors: list[Tensor | None]) -> list[int]:
    """Return for every tensor the place of its first occurrence."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]


def _same_tensors(tensors: list[Tensor | None], others: list[Tensor | None]) -> bool:
    if len(tensors) != len(others):
        return False
    return all(
        a is b
        or (a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype and a.device == b.device)
        for a, b in zip(tensors, others, strict=True)
    )


def hooked(module: nn.Module) -> bool:
    """Whether a module has forward or backward hooks of its own."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _same(module: nn.Module, other: nn.Module, settings: list[tuple[str, Any]]) -> bool:
    if module is other:
        return True
    if type(module) is not type(other) or module.training != other.training or hooked(other):
        return False
    if (
        module._modules.keys() != other._modules.keys()
        or module._parameters.keys() != other._parameters.keys()
        or module._buffers.keys() != other._buffers.keys()
    ):
        return False
    others = vars(other)
    if len(others) != len(vars(module)):
        return False
    return all(key in others and _equal(value, others[key]) for key, value in settings)


def _equal(a: Any, b: Any) -> bool:
    """Whether two settings are, and stay, the same: the same object, or equal values that cannot change."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple or type(a) is frozenset:
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, _IMMUTABLE) and bool(a == b)
