"""Attributions: which inputs, tokens, hidden states and attention weights an output came from."""

from gradreg.attribution._result import Attribution as Attribution
