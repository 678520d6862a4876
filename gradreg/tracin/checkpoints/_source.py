"""What is known of a checkpoint before its weights are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Source", "as_rate", "rate_of_groups"]


@dataclass(frozen=True)
class Source:
    """Where weights come from, and what stands beside them.

    Attributes:
        place: Path, or `"state dict"`.
        weights: Reads the weights.
        learning_rate: What was found, or None.
        rate_origin: Where it was found; or, without one, where it was looked for.
        optimizer: Reads the state dict of the optimizer; None where there is none.
    """

    place: str
    weights: Callable[[], Mapping[str, Tensor]]
    learning_rate: float | None
    rate_origin: str
    optimizer: Callable[[], Mapping[str, Any]] | None = None


def as_rate(value: Any) -> float | None:
    """Return a number or a tensor of one number as a float, anything else as None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    return None


def rate_of_groups(groups: Sequence[Mapping[str, Any]], origin: str) -> tuple[float | None, str]:
    """Return the learning rate that all parameter groups of an optimizer share, and where it stands; None if they differ."""
    rates = {rate for group in groups if (rate := as_rate(group.get("lr"))) is not None}
    if len(rates) > 1:
        return None, f"{origin}, whose groups have different ones: {sorted(rates)}"
    return (rates.pop() if rates else None), origin
