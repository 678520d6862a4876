"""Names of scalars, for headings."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

__all__ = ["name_of"]


def name_of(value: Any) -> str:
    """Return a scalar as people wrote it: functions by name, settings that are not the default.

    Example:
        >>> import torch.nn.functional as F, gradreg as gr
        >>> from gradreg.attribution.attention._names import name_of
        >>> name_of(gr.loss(F.cross_entropy, mean=True))
        'Loss(cross_entropy, mean=True)'
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        if type(value).__name__.startswith("_") and fields:
            return name_of(getattr(value, fields[0].name))  # a wrapper that nobody wrote
        told = []
        for field in fields:
            own = getattr(value, field.name)
            if field.default is dataclasses.MISSING and callable(own):
                told.append(name_of(own))
            elif field.default is dataclasses.MISSING or (own is not field.default and own != field.default):
                told.append(f"{field.name}={name_of(own)}")
        return f"{type(value).__name__}({', '.join(told)})"
    text = repr(value)
    if " at 0x" not in text:
        return re.sub(r"\s+", " ", text)
    name = getattr(value, "__name__", None) or type(value).__name__
    return "a function" if name == "<lambda>" else str(name)
