"""gradreg: gradients, and gradients of gradients, in PyTorch."""

from gradreg import errors as errors
from gradreg import heads as heads
from gradreg import penalties as penalties
from gradreg import regularizers as regularizers
from gradreg import scalars as scalars
from gradreg import schedules as schedules
from gradreg.attribution import AttentionReport as AttentionReport
from gradreg.attribution import Attribution as Attribution
from gradreg.attribution import LogitJacobian as LogitJacobian
from gradreg.attribution import SimilarityReport as SimilarityReport
from gradreg.attribution import attention_report as attention_report
from gradreg.attribution import expected_gradients as expected_gradients
from gradreg.attribution import explain_similarity as explain_similarity
from gradreg.attribution import input_x_gradient as input_x_gradient
from gradreg.attribution import integrated_gradients as integrated_gradients
from gradreg.attribution import logit_jacobian as logit_jacobian
from gradreg.attribution import mean_embedding as mean_embedding
from gradreg.attribution import saliency as saliency
from gradreg.attribution import smooth_grad as smooth_grad
from gradreg.attribution import token_baseline as token_baseline
from gradreg.batch import Batch as Batch
from gradreg.batch import as_batch as as_batch
from gradreg.diagnosis import DoubleBackwardReport as DoubleBackwardReport
from gradreg.diagnosis import check_double_backward as check_double_backward
from gradreg.diagnosis import smooth_activations as smooth_activations
from gradreg.engine import Plan as Plan
from gradreg.engine import directional as directional
from gradreg.engine import gradients as gradients
from gradreg.engine import inner_scale as inner_scale
from gradreg.engine import plan as plan
from gradreg.engine import products as products
from gradreg.errors import GradregError as GradregError
from gradreg.errors import ZeroSecondDerivativeWarning as ZeroSecondDerivativeWarning
from gradreg.model import Ensemble as Ensemble
from gradreg.model import SharedBase as SharedBase
from gradreg.objective import Objective as Objective
from gradreg.regularizers import Regularizer as Regularizer
from gradreg.scalars import across_heads as across_heads
from gradreg.scalars import all_logits as all_logits
from gradreg.scalars import log_probability as log_probability
from gradreg.scalars import logit as logit
from gradreg.scalars import loss as loss
from gradreg.scalars import margin as margin
from gradreg.scalars import probability as probability
from gradreg.scalars import token_loss as token_loss
from gradreg.scalars import top_logit as top_logit
from gradreg.scalars import true_logit as true_logit
from gradreg.tracin import Checkpoint as Checkpoint
from gradreg.tracin import TracIn as TracIn
from gradreg.tracin import read_checkpoints as read_checkpoints
from gradreg.wrt import Activations as Activations
from gradreg.wrt import AttentionMaps as AttentionMaps
from gradreg.wrt import Embeddings as Embeddings
from gradreg.wrt import Features as Features
from gradreg.wrt import Inputs as Inputs
from gradreg.wrt import Outputs as Outputs
from gradreg.wrt import Params as Params

__version__ = "0.1.0"

__all__ = [
    "Activations",
    "AttentionMaps",
    "AttentionReport",
    "Attribution",
    "Batch",
    "Checkpoint",
    "DoubleBackwardReport",
    "Embeddings",
    "Ensemble",
    "Features",
    "GradregError",
    "Inputs",
    "LogitJacobian",
    "Objective",
    "Outputs",
    "Params",
    "Plan",
    "Regularizer",
    "SharedBase",
    "SimilarityReport",
    "TracIn",
    "ZeroSecondDerivativeWarning",
    "across_heads",
    "all_logits",
    "as_batch",
    "attention_report",
    "check_double_backward",
    "directional",
    "errors",
    "expected_gradients",
    "explain_similarity",
    "gradients",
    "heads",
    "inner_scale",
    "input_x_gradient",
    "integrated_gradients",
    "log_probability",
    "logit",
    "logit_jacobian",
    "loss",
    "margin",
    "mean_embedding",
    "penalties",
    "plan",
    "probability",
    "products",
    "read_checkpoints",
    "regularizers",
    "saliency",
    "scalars",
    "schedules",
    "smooth_activations",
    "smooth_grad",
    "token_baseline",
    "token_loss",
    "top_logit",
    "true_logit",
]
