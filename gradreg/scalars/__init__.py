"""`of`: what is differentiated. A scalar maps the outputs of one head to `[n]` or `[n, *targets]`.

A scalar is any callable `(outputs, batch) -> tensor` whose first axis is the example. Those here are the usual ones; they
are frozen, so that equal scalars are computed once in a shared session. Per-example data is read from `batch` only.
"""

from gradreg.scalars._across import AcrossHeads as AcrossHeads
from gradreg.scalars._across import across_heads as across_heads
from gradreg.scalars._classes import all_logits as all_logits
from gradreg.scalars._classes import log_probability as log_probability
from gradreg.scalars._classes import logit as logit
from gradreg.scalars._classes import margin as margin
from gradreg.scalars._classes import probability as probability
from gradreg.scalars._classes import top_logit as top_logit
from gradreg.scalars._classes import true_logit as true_logit
from gradreg.scalars._loss import check_labels as check_labels
from gradreg.scalars._loss import loss as loss
from gradreg.scalars._loss import token_loss as token_loss
from gradreg.scalars._loss import unreduced as unreduced
from gradreg.scalars._outputs import IGNORED_LABEL as IGNORED_LABEL
from gradreg.scalars._outputs import ScalarFunction as ScalarFunction
from gradreg.scalars._outputs import bind as bind
from gradreg.scalars._outputs import check_scalar as check_scalar
from gradreg.scalars._outputs import is_causal_language_model as is_causal_language_model
from gradreg.scalars._outputs import paired as paired
from gradreg.scalars._outputs import read_outputs as read_outputs
from gradreg.scalars._outputs import reads_targets as reads_targets
from gradreg.scalars._outputs import scalar_key as scalar_key
from gradreg.scalars._totals import projected as projected
from gradreg.scalars._totals import total as total
from gradreg.scalars._totals import total_log_probability as total_log_probability

__all__ = [
    "AcrossHeads",
    "ScalarFunction",
    "across_heads",
    "all_logits",
    "log_probability",
    "logit",
    "loss",
    "margin",
    "probability",
    "projected",
    "read_outputs",
    "token_loss",
    "top_logit",
    "total",
    "total_log_probability",
    "true_logit",
]
