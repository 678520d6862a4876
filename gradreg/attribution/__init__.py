"""Attributions: which inputs, tokens, hidden states and attention weights an output came from."""

from gradreg.attribution._result import Attribution as Attribution
from gradreg.attribution.similarity import SimilarityReport as SimilarityReport
from gradreg.attribution.similarity import explain_similarity as explain_similarity
