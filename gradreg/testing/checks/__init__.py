"""Checks to run on code of your own, each in one call with a readable failure."""

from gradreg.testing.checks._against_loop import check_against_loop as check_against_loop
from gradreg.testing.checks._regularizer import REGULARIZER_PROPERTIES as REGULARIZER_PROPERTIES
from gradreg.testing.checks._regularizer import check_regularizer as check_regularizer
from gradreg.testing.checks._report import CheckFailure as CheckFailure
from gradreg.testing.checks._report import Finding as Finding
from gradreg.testing.checks._report import RegularizerReport as RegularizerReport

__all__ = [
    "REGULARIZER_PROPERTIES",
    "CheckFailure",
    "Finding",
    "RegularizerReport",
    "check_against_loop",
    "check_regularizer",
]
