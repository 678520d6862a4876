"""Find the object that a `_target_` names, among those that configurations may name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gradreg.errors import closest

__all__ = ["ALLOWED", "LocateError", "locate"]

ALLOWED = ("gradreg.", "torch.")
"""Prefixes of `_target_` that need no permission."""


class LocateError(ValueError):
    """A `_target_` that is not allowed, does not exist or cannot be called."""


def locate(name: str, extra: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Import the object of that dotted name.

    Args:
        name: Such as `torch.optim.Adam`.
        extra: Further allowed prefixes, from `allow_targets` in the configuration.

    Returns:
        A class or function.

    Raises:
        LocateError: If it is not allowed or not there; the closest names are listed.
    """
    prefixes = ALLOWED + tuple(prefix.rstrip(".") + "." for prefix in extra)
    if not name.startswith(prefixes):
        raise LocateError(
            f"{name!r} is not allowed; targets start with {' or '.join(prefixes)} "
            "Add the prefix of your own package to allow_targets."
        )
    target: Any = None
    names = name.split(".")
    for position, part in enumerate(names):
        before = ".".join(names[:position])
        if position and hasattr(target, part) and not isinstance(getattr(target, part), ModuleType):
            target = getattr(target, part)
            continue
        module = f"{before}.{part}" if before else part
        try:
            target = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and not module.startswith(error.name):
                raise LocateError(f"{name!r} needs the package {error.name!r}, which is not installed.") from error
            found = [item for item in dir(target) if not item.startswith("_")] if position else list(prefixes)
            raise LocateError(
                f"{before or 'Python'} has no {part!r} ({name!r}). Closest: {closest(part, found)}."
            ) from error
    home = getattr(target, "__module__", None)
    if not callable(target):
        raise LocateError(f"{name!r} is {type(target).__name__}, which cannot be called.")
    if home is not None and not f"{home}.".startswith(prefixes):  # such as torch.os.system
        raise LocateError(
            f"{name!r} comes from {home!r}, which is not allowed; targets start with {' or '.join(prefixes)}"
        )
    return target  # type: ignore[no-any-return]  # checked callable above
