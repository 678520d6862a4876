"""Penalties: pure, differentiable functions of gradients, for users with gradients of their own."""

from gradreg.penalties._alignment import SIMILARITIES as SIMILARITIES
from gradreg.penalties._alignment import alignment_matrix as alignment_matrix
from gradreg.penalties._alignment import factored_alignment as factored_alignment
from gradreg.penalties._alignment import factors_are_cheaper as factors_are_cheaper
from gradreg.penalties._alignment import pairwise_alignment as pairwise_alignment
from gradreg.penalties._attributions import gini as gini
from gradreg.penalties._attributions import total_variation as total_variation
from gradreg.penalties._coherence import coherence as coherence
from gradreg.penalties._matching import MATCHINGS as MATCHINGS
from gradreg.penalties._matching import gradient_distance as gradient_distance
from gradreg.penalties._metric import Metric as Metric
from gradreg.penalties._metric import MetricLike as MetricLike
from gradreg.penalties._metric import as_metric as as_metric
from gradreg.penalties._metric import under as under
from gradreg.penalties._norms import Gradients as Gradients
from gradreg.penalties._norms import check_eps as check_eps
from gradreg.penalties._norms import cosine as cosine
from gradreg.penalties._norms import norm as norm
from gradreg.penalties._norms import squared_norm as squared_norm
from gradreg.penalties._precision import full_precision as full_precision
from gradreg.penalties._precision import precise as precise
from gradreg.penalties._quadratic import factored_quadratic_form as factored_quadratic_form
from gradreg.penalties._quadratic import factored_row_distance as factored_row_distance
from gradreg.penalties._quadratic import quadratic_form as quadratic_form

__all__ = [
    "MATCHINGS",
    "SIMILARITIES",
    "Metric",
    "alignment_matrix",
    "as_metric",
    "coherence",
    "cosine",
    "gini",
    "gradient_distance",
    "norm",
    "pairwise_alignment",
    "squared_norm",
    "total_variation",
]
