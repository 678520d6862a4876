"""Attention masks of transformers, built without looking at their values."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gradreg.model._walk import all_modules

# Private names of transformers, looked up anew at every use; what asks "is somebody tracing?" has bound them at import
_MODULES = ("masking_utils", "modeling_utils", "modeling_attn_mask_utils")
_PREDICATES = ("is_tracing", "is_torchdynamo_compiling")


def _always(*_: object, **__: object) -> bool:
    return True


def _places() -> list[tuple[dict[str, Any], str]]:
    loaded = [sys.modules.get(f"transformers.{name}") for name in _MODULES]
    return [
        (vars(module), name)
        for module in loaded
        if module is not None
        for name in _PREDICATES
        if callable(vars(module).get(name))
    ]


def looks_at_masks(model: nn.Module) -> bool:
    """Whether a model is of transformers, which saves work where a mask hides nothing, and can be told not to look."""
    classes = {type(module) for module in all_modules(model)}
    own = any(base.__module__.partition(".")[0] == "transformers" for kind in classes for base in kind.__mro__)
    return own and bool(_places())


@contextmanager
def masks_in_full() -> Iterator[None]:
    """Let models of transformers build all masks in full inside, as they do while they are traced.

    They then read no value of a mask or of token ids, which is impossible under `torch.func.vmap`. Seen by the whole process.

    Yields:
        Nothing.
    """
    places = [(names, name, names[name]) for names, name in _places()]
    try:
        for names, name, _ in places:
            names[name] = _always
        yield
    finally:
        for names, name, before in places:
            names[name] = before
