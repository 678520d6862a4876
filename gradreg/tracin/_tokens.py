"""Scalars per token, from scalars per sequence."""

from __future__ import annotations

from dataclasses import replace

from gradreg.scalars import ScalarFunction
from gradreg.scalars._loss import Loss

__all__ = ["per_token"]


def per_token(of: ScalarFunction) -> ScalarFunction:
    """Return the scalar with one value per token, which add up to the sequence's; others must be so already."""
    return replace(of, per_token=True) if isinstance(of, Loss) else of
