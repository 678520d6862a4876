"""Functions and settings as plain values that are the same in every process."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


def describe(value: Any) -> Any:
    """Return plain values that tell settings apart, without addresses in memory.

    A function is known by its name, its code and what it closes over, so that an edited one is noticed; torch's own by
    name alone.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [describe(item) for item in value]
        return sorted(items, key=str) if isinstance(value, (set, frozenset)) else items
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return f"tensor {data.dtype} {list(data.shape)} {_hash(raw)}"
    if isinstance(value, functools.partial):
        return {"partial": describe(value.func), "args": describe(value.args), "keywords": describe(value.keywords)}
    if is_dataclass(value) and not isinstance(value, type):
        inner = {field.name: describe(getattr(value, field.name)) for field in fields(value)}
        return {"type": _name(type(value)), **inner}
    if isinstance(value, nn.Module):
        plain = {n: v for n, v in vars(value).items() if isinstance(v, (bool, int, float, str)) and n != "training"}
        state = describe(dict(value.state_dict()))
        return {"type": _name(type(value)), "shown": repr(value), "settings": describe(plain), "state": state}
    if isinstance(value, types.MethodType):
        return {"method": describe(value.__func__), "of": describe(value.__self__)}
    if isinstance(value, types.FunctionType):
        return _function(value)
    if isinstance(value, type) or callable(value):
        named = _name(value) if hasattr(value, "__qualname__") else _name(type(value))
        own = None if isinstance(value, type) else getattr(value, "__dict__", None)
        return {"type": named, **describe(own)} if own else named
    shown = repr(value)
    return _name(type(value)) if " at 0x" in shown else f"{_name(type(value))} {shown}"


def _function(function: types.FunctionType) -> Any:
    if function.__module__.split(".")[0] in ("torch", "gradreg") and function.__closure__ is None:
        return _name(function)
    closed = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            closed[name] = describe(cell.cell_contents)
        except ValueError:  # not filled yet
            closed[name] = None
    described: dict[str, Any] = {"function": function.__qualname__, "code": _code(function.__code__)}
    if closed:
        described["closure"] = closed
    if function.__defaults__ or function.__kwdefaults__:
        described["defaults"] = describe([function.__defaults__, function.__kwdefaults__])
    return described


def _code(code: types.CodeType) -> str:
    """Hash what a function does, with the functions defined in it; where its file lies does not matter."""
    constants = [_code(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts]
    return _hash(repr((code.co_code, constants, code.co_names, code.co_varnames)).encode())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__name__)}"
