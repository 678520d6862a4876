"""Regularizers: one published method per file."""

from gradreg.regularizers._base import Regularizer as Regularizer
from gradreg.regularizers.diverse_heads import DiverseHeads as DiverseHeads

__all__ = ["DiverseHeads"]
