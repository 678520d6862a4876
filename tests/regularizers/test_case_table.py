"""What every regularizer must do, over the case table."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import gradreg as gr
from gradreg.model import swapped
from gradreg.regularizers import Regularizer
from tests.cases import CASES, RegularizerCase

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_the_table_the_configuration_and_the_public_names_agree() -> None:
    public = set(gr.regularizers.__all__)
    files = {path.stem.replace("_", "") for path in Path("conf/regularizer").glob("*.yaml")}
    assert {case.name.partition("-")[0] for case in CASES} == public
    assert files == {name.lower() for name in public}
    assert all(issubclass(getattr(gr.regularizers, name), Regularizer) for name in public)


@EVERY
def test_first_and_second_derivative(case: RegularizerCase) -> None:
    model, batch, regularizer = case.make_model(), case.make_batch(), case.make()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def value(*parameters: Tensor) -> Tensor:
        with swapped(model, dict(zip(names, parameters, strict=True))):
            return regularizer(model, batch)

    parameters = [dict(model.named_parameters())[name] for name in names]
    assert gradcheck(value, parameters, fast_mode=True)
    assert gradgradcheck(value, parameters, fast_mode=True)


@EVERY
def test_permuting_examples_changes_nothing(case: RegularizerCase) -> None:
    model, batch, regularizer = case.make_model(), case.make_batch(), case.make()
    order = torch.randperm(len(batch))
    torch.testing.assert_close(regularizer(model, batch[order]), regularizer(model, batch), rtol=1e-12, atol=1e-14)


@EVERY
def test_duplicating_the_batch_proves_the_reduction(case: RegularizerCase) -> None:
    model, batch, regularizer = case.make_model(), case.make_batch(), case.make()
    twice = batch[list(range(len(batch))) * 2]
    factor = 1 if case.invariant_to_duplicates else 2
    torch.testing.assert_close(regularizer(model, twice), factor * regularizer(model, batch), rtol=1e-12, atol=1e-14)


@EVERY
def test_single_example(case: RegularizerCase) -> None:
    model, batch = case.make_model(), case.make_batch()
    penalty = case.make()(model, batch[:1])
    penalty.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


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
