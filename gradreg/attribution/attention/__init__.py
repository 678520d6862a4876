"""Attention and the gradients of attention: per layer, head and kind of token."""

from gradreg.attribution.attention._report import AttentionReport as AttentionReport
from gradreg.attribution.attention._run import attention_report as attention_report
from gradreg.attribution.attention._side import AttentionSide as AttentionSide
from gradreg.attribution.attention._statistics import QUANTITIES as QUANTITIES

__all__ = ["QUANTITIES", "AttentionReport", "AttentionSide", "attention_report"]
