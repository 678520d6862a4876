"""What every regularizer must do, over the case table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import gradreg as gr
from gradreg.model import swapped
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
    derivatives = ("first_derivative", "second_derivative", "gradgradcheck")
    skip = {} if case.derivative_of_value else dict.fromkeys(derivatives, "its gradient is not that of its value")
    report = check_regularizer(case.make(), case.make_model(), case.make_batch(), reduction=reduction, skip=skip)
    if case.derivative_of_value:
        assert report["first_derivative"].status == report["second_derivative"].status == "passed"


EVERY_MODEL = pytest.mark.parametrize(
    ("case", "make_model", "make_batch"),
    [
        pytest.param(case, make_model, make_batch, id=f"{case.name}-{name}")
        for case in CASES
        if case.derivative_of_value
        for name, make_model, make_batch in case.more_models
    ],
)


@EVERY_MODEL
def test_first_and_second_derivative(
    case: RegularizerCase, make_model: Callable[[], nn.Module], make_batch: Callable[[], gr.Batch]
) -> None:
    """Along random directions of all parameters together: one small variable instead of a check per tensor."""
    model, batch, regularizer = make_model(), make_batch(), case.make()
    start = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    directions = {name: torch.randn(3, *p.shape, dtype=p.dtype) for name, p in start.items()}

    def value(steps: Tensor) -> Tensor:
        moved = {name: p + torch.tensordot(steps, directions[name], 1) for name, p in start.items()}
        with swapped(model, moved):
            return regularizer(model, batch)

    steps = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(value, steps, fast_mode=True)
    assert gradgradcheck(value, steps, fast_mode=True)


@EVERY
def test_single_example(case: RegularizerCase) -> None:
    model, batch = case.make_model(), case.make_batch()
    penalty = case.make()(model, batch[list(case.fewest)])
    penalty.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@EVERY
def test_alone_and_in_an_objective_it_is_the_same(case: RegularizerCase) -> None:
    model, batch, regularizer = case.make_model(), case.make_batch(), case.make()
    alone = regularizer(model, batch).detach()  # before the objective, which moves its state
    _, logs = gr.Objective(case.task, penalty=regularizer)(model, batch)
    torch.testing.assert_close(logs["penalty"], alone, rtol=1e-12, atol=1e-14)


@EVERY
def test_it_is_unweighted_and_declares_itself(case: RegularizerCase) -> None:
    regularizer = case.make()
    assert regularizer.order >= 1
    assert isinstance(regularizer.additive, bool)
    assert "References:" in (inspect.getdoc(type(regularizer)) or "")
    model, batch = case.make_model(), case.make_batch()
    before = regularizer(model, batch)
    regularizer.weight = gr.schedules.Constant(7.0)
    assert torch.equal(regularizer(model, batch), before)
