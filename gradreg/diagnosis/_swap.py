"""Putting stand-ins in the place of a model's activations, and taking them out again."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradreg.batch import Batch
from gradreg.diagnosis._activations import ACTIVATIONS, OF_MODULE, Activation
from gradreg.diagnosis._stand_ins import (
    SECOND_PASS,
    SMOOTH,
    ActivationStandIn,
    OwnCalls,
    Scheme,
    StandIn,
    Watch,
    own_calls_class,
)
from gradreg.model import call, devices_of, preserved, walk

_NAMES = frozenset().union(*(row.names for row in ACTIVATIONS))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Swap:
    """Changes of one model, which can be undone.

    Args:
        model: The model, which is changed.
        scheme: How.
    """

    def __init__(self, model: nn.Module, scheme: Scheme) -> None:
        self.model, self.scheme = model, scheme
        self.swapped: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._undo: list[Callable[[], Any]] = []

    def apply(self, batch: Batch | None = None) -> None:
        """Replace all that can be, note what cannot; with a batch, also look at what a forward really calls."""
        try:
            for name, module in walk(self.model):
                if not self._module(name, module):
                    self._attributes(name, module)
                    self._own_calls(name, module, _called_in(type(module)))
            if batch is not None:
                self._watch(batch)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Take everything back."""
        while self._undo:
            self._undo.pop()()

    def _module(self, name: str, module: nn.Module) -> bool:
        """Replace a module that is an activation; say whether nothing is left to do with it."""
        if isinstance(module, ActivationStandIn):
            return True
        reason = _fixed(module)
        if reason:
            self.left[_label(name)] = reason
            return True
        own = self.scheme.modules.get(type(module), ...)
        if own is None:
            return True
        if own is not ...:
            self._replace(name, module, own(module))
            return True
        row = _row_of(module)
        if row is None or row.module in self.scheme.modules:
            return row is not None
        kind = (SECOND_PASS if self.scheme.second_pass else SMOOTH).get(row.module)
        if kind is not None:
            before = type(module).__name__
            self._retype(module, kind)
            self.swapped[_label(name)] = f"{before} -> {kind.__name__}"
        return True

    def _retype(self, module: nn.Module, kind: type[nn.Module]) -> None:
        plain = module.__class__
        module.__class__ = kind
        self._undo.append(lambda: setattr(module, "__class__", plain))
        self._set(vars(module), "_gradreg_scheme", self.scheme)

    def _set(self, table: dict[str, Any], key: str, value: Any) -> None:
        if key in table:
            before = table[key]
            self._undo.append(lambda: table.__setitem__(key, before))
        else:
            self._undo.append(lambda: table.pop(key, None))
        table[key] = value

    def _replace(self, name: str, old: nn.Module, new: nn.Module) -> None:
        """Put a module of the user's choice into every place of another, with its flag and hooks."""
        new.train(old.training)
        for hooks in _HOOKS:
            getattr(new, hooks).update(getattr(old, hooks))
        if old is self.model:
            self.model = new
        for _, parent in walk(self.model):
            for key, child in parent._modules.items():
                if child is old:
                    parent._modules[key] = new
        self.swapped[_label(name)] = f"{type(old).__name__} -> {type(new).__name__}"

    def _attributes(self, name: str, module: nn.Module) -> None:
        """Replace activation functions that a module keeps as attributes."""
        for key, value in list(vars(module).items()):
            found = self._stand_in(value)
            if found is not value:
                self._set(vars(module), key, found)
                self.swapped[_label(f"{name}.{key}" if name else key)] = f"{_shown(value)} -> {_shown(found)}"
            elif isinstance(value, types.FunctionType) and _NAMES & set(value.__code__.co_names):
                self._own_calls(name, module, _NAMES & set(value.__code__.co_names))
        fused = getattr(module, "activation_relu_or_gelu", 0)  # which kernel the inference path of a transformer takes
        activation = getattr(module, "activation", None)
        if fused and (isinstance(activation, (StandIn, ActivationStandIn)) or _row_of(activation)):
            self._set(vars(module), "activation_relu_or_gelu", 0)

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, functools.partial) and self.scheme.replaces(value.func):
            return functools.partial(self.scheme.stand_in(value.func), *value.args, **value.keywords)
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            found = [self._stand_in(item) for item in value]
            return type(value)(found) if any(a is not b for a, b in zip(found, value, strict=True)) else value
        if callable(value) and not isinstance(value, nn.Module) and self.scheme.replaces(value):
            return self.scheme.stand_in(value)
        return value

    def _own_calls(self, name: str, module: nn.Module, names: frozenset[str] | set[str]) -> None:
        """Let calls of activation functions in a module's own forward be replaced."""
        wanted = {
            function.__name__
            for row in ACTIVATIONS
            for function in row.functions
            if function.__name__ in names and self.scheme.replaces(function)
        }
        if not wanted or isinstance(module, OwnCalls):
            return
        self._retype(module, own_calls_class(type(module)))
        self.swapped[_label(name)] = f"{', '.join(sorted(wanted))} in {type(module).__name__}.forward"

    def _watch(self, batch: Batch) -> None:
        """Run the model and follow calls that no source showed to the module that makes them."""
        owners: dict[int, set[str]] = {}

        def note(function: str) -> None:
            owner = _caller(known)
            owners.setdefault(0 if owner is None else id(owner), set()).add(function)

        for _ in range(2):  # once to find them, once to see whether that was all
            owners.clear()
            known = {id(module): (name, module) for name, module in walk(self.model)}
            with torch.no_grad(), preserved(self.model, devices_of(self.model)), Watch(self.scheme, note):
                call(self.model, batch.map(torch.clone))  # the first layer may work in place
            for key, names in owners.items():
                if key:
                    name, module = known[key]
                    self._own_calls(name, module, names)
                else:
                    self.left["(outside any module)"] = f"calls {', '.join(sorted(names))}; make it part of a module"
            if not owners:
                return


def _row_of(module: Any) -> Activation | None:
    """Return the activation that a module is; a subclass with a forward of its own is another function."""
    row = OF_MODULE.get(type(module))
    if row is not None:
        return row
    return next((r for kind, r in OF_MODULE.items() if getattr(type(module), "forward", None) is kind.forward), None)


def _fixed(module: nn.Module) -> str:
    """Say why the activations inside a module cannot be replaced, and what to do."""
    if (isinstance(module, nn.RNN) and module.nonlinearity == "relu") or (
        isinstance(module, nn.RNNCell) and module.nonlinearity == "relu"
    ):
        return 'its ReLU lies inside the kernel; build it with nonlinearity="tanh", or use a GRU or LSTM'
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by TorchScript; use the Python module it was made from"
    if type(module).__name__ == "OptimizedModule":
        return "it is compiled; use the module it was made from (model._orig_mod)"
    return ""


def _called_in(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of activation functions that the methods of a class call, by its source."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.split(".")[0] in ("torch", "gradreg", "builtins"):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # made in an interpreter: the compiled names know less, but enough
            functions = [value for value in vars(base).values() if isinstance(value, types.FunctionType)]
            found.update(*(_NAMES & set(function.__code__.co_names) for function in functions))
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in _NAMES:
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and node.attr in _NAMES and not _is_self(node.value):
                found.add(node.attr)
    return frozenset(found)


def _is_self(node: ast.expr) -> bool:
    """Whether an attribute is one of the module, so that a child of that name is called."""
    return isinstance(node, ast.Name) and node.id == "self"


def _caller(known: dict[int, tuple[str, nn.Module]]) -> nn.Module | None:
    """Return the innermost module in whose method the call was made."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in known:
            return owner
        frame = frame.f_back
    return None


def _label(name: str) -> str:
    return name or "(the model)"


def _shown(value: Any) -> str:
    return value.__name__ if hasattr(value, "__name__") and not isinstance(value, StandIn) else repr(value)
