"""What every regularizer must do, over the case table."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

import gradreg as gr
from gradreg.regularizers import Regularizer
from gradreg.testing import check_regularizer
from tests.cases import CASES, RegularizerCase

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_the_table_the_configuration_and_the_public_names_agree() -> None:
    public = set(gr.regularizers.__all__)
    files = {path.stem.replace("_", "") for path in Path("conf/regularizer").glob("*.yaml")}
    assert {case.name.partition("-")[0] for case in CASES} == public
    assert files == {name.lower() for name in public}
    assert all(issubclass(getattr(gr.regularizers, name), Regularizer) for name in public)


@EVERY
def test_all_that_should_hold_for_a_regularizer(case: RegularizerCase) -> None:
    """Derivatives, invariances, side effects, state, precision, declarations: see `check_regularizer`."""
    reduction = "mean" if case.invariant_to_duplicates else "sum"
    report = check_regularizer(case.make(), case.make_model(), case.make_batch(), reduction=reduction)
    assert report["first_derivative"].status == report["second_derivative"].status == "passed"


@EVERY
def test_alone_and_in_an_objective_it_is_the_same(case: RegularizerCase) -> None:
    model, batch, regularizer = case.make_model(), case.make_batch(), case.make()
    _, logs = gr.Objective(torch.nn.functional.cross_entropy, penalty=regularizer)(model, batch)
    torch.testing.assert_close(logs["penalty"], regularizer(model, batch).detach(), rtol=1e-12, atol=1e-14)


@EVERY
def test_it_is_unweighted_and_declares_itself(case: RegularizerCase) -> None:
    regularizer = case.make()
    assert regularizer.order in (2, 3)
    assert isinstance(regularizer.additive, bool)
    assert "References:" in (inspect.getdoc(type(regularizer)) or "")
    model, batch = case.make_model(), case.make_batch()
    before = regularizer(model, batch)
    regularizer.weight = gr.schedules.Constant(7.0)
    assert torch.equal(regularizer(model, batch), before)
