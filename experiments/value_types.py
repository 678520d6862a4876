"""Compare plain configuration values with the annotations of what receives them."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from gradreg.errors import closest

__all__ = ["mismatch"]

_PLAIN = (bool, int, float, str, type(None))


def mismatch(value: Any, key: str, target: Callable[..., Any]) -> str | None:
    """Say why a value cannot be that argument, or None if it can or nobody knows.

    Only text, numbers, flags and `Literal` are judged; objects check the rest themselves.
    """
    kinds = _members(_hint(key, target))
    if not isinstance(value, (str, int, float)) or value == "???" or any(map(_open, kinds)):
        return None
    literals = [item for kind in kinds if typing.get_origin(kind) is typing.Literal for item in typing.get_args(kind)]
    if value in literals or any(_fits(value, kind) for kind in kinds):
        return None
    foreign = [kind for kind in kinds if kind not in _PLAIN and typing.get_origin(kind) is not typing.Literal]
    if foreign and not isinstance(value, str):  # a number may become what is wanted, text from YAML will not
        return None
    if literals:
        return f"{value!r} is not allowed. Closest: {closest(str(value), map(str, literals))}."
    allowed = [getattr(kind, "__name__", str(kind)) for kind in kinds if kind is not type(None)]
    return f"{value!r} is {type(value).__name__}; expected {' or '.join(allowed)}."


def _open(hint: Any) -> bool:
    return hint in (Any, object, inspect.Parameter.empty) or isinstance(hint, typing.TypeVar)


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return kind in _PLAIN and isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _hint(key: str, target: Callable[..., Any]) -> Any:
    try:
        return typing.get_type_hints(target.__init__ if isinstance(target, type) else target).get(key, Any)
    except Exception:  # annotations of foreign packages may name what is not importable
        return Any


def _members(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [member for part in typing.get_args(hint) for member in _members(part)]
    return [hint]
