"""Helpers for tests: the naive truth to compare with, and a zoo of awkward models to compare on.

Example:
    >>> from gradreg import gradients
    >>> from gradreg.testing import assert_same, reference, zoo
    >>> case = zoo.case("tied_weights")
    >>> model, batch = case.make_model(), case.make_batch()
    >>> wrt = case.wrts["params"]
    >>> assert_same(gradients(model, batch, case.of, wrt), reference.gradients(model, batch, case.of, wrt))
"""

from gradreg.testing import reference as reference
from gradreg.testing import zoo as zoo
from gradreg.testing.checks import REGULARIZER_PROPERTIES as REGULARIZER_PROPERTIES
from gradreg.testing.checks import check_against_loop as check_against_loop
from gradreg.testing.checks import check_regularizer as check_regularizer
from gradreg.testing.compare import assert_same as assert_same

__all__ = ["REGULARIZER_PROPERTIES", "assert_same", "check_against_loop", "check_regularizer", "reference", "zoo"]
