"""Attributions: which inputs, tokens, hidden states and attention weights an output came from."""

from gradreg.attribution._result import Attribution as Attribution
from gradreg.attribution.attention import AttentionReport as AttentionReport
from gradreg.attribution.attention import attention_report as attention_report
