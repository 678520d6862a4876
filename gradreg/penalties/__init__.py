"""Penalties: pure, differentiable functions of gradients, for users with gradients of their own."""

from gradreg.penalties._alignment import SIMILARITIES as SIMILARITIES
from gradreg.penalties._alignment import alignment_matrix as alignment_matrix
from gradreg.penalties._alignment import pairwise_alignment as pairwise_alignment

__all__ = ["SIMILARITIES", "alignment_matrix", "pairwise_alignment"]
