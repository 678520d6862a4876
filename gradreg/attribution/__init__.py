"""Attributions: which inputs, tokens, hidden states and attention weights an output came from."""

from gradreg.attribution._baselines import mean_embedding as mean_embedding
from gradreg.attribution._baselines import token_baseline as token_baseline
from gradreg.attribution._expected import expected_gradients as expected_gradients
from gradreg.attribution._gradients import input_x_gradient as input_x_gradient
from gradreg.attribution._gradients import saliency as saliency
from gradreg.attribution._gradients import smooth_grad as smooth_grad
from gradreg.attribution._integrated import integrated_gradients as integrated_gradients
from gradreg.attribution._jacobian import LogitJacobian as LogitJacobian
from gradreg.attribution._jacobian import logit_jacobian as logit_jacobian
from gradreg.attribution._quadrature import GaussLegendre as GaussLegendre
from gradreg.attribution._quadrature import LogSpaced as LogSpaced
from gradreg.attribution._result import Attribution as Attribution
from gradreg.attribution.attention import AttentionReport as AttentionReport
from gradreg.attribution.attention import attention_report as attention_report
from gradreg.attribution.similarity import SimilarityReport as SimilarityReport
from gradreg.attribution.similarity import explain_similarity as explain_similarity
