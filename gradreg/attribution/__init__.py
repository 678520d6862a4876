"""Attributions: which inputs, tokens, hidden states and attention weights an output came from."""

from gradreg.attribution._baselines import mean_embedding as mean_embedding
from gradreg.attribution._baselines import token_baseline as token_baseline
from gradreg.attribution._integrated import integrated_gradients as integrated_gradients
from gradreg.attribution._quadrature import GaussLegendre as GaussLegendre
from gradreg.attribution._quadrature import LogSpaced as LogSpaced
from gradreg.attribution._result import Attribution as Attribution
