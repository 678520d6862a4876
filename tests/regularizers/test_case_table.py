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
from tests.cases import CASES, RegularizerCase

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_the_table_the_configuration_and_the_public_names_agree() -> None:
    public = set(gr.regularizers.__all__)
    files = {path.stem.replace("_", "") for path in Path("conf/regularizer").glob("*.yaml")}
    assert {case.name.partition("-")[0] for case in CASES} == public
    assert files == {name.lower() for name in public}
    assert all(issubclass(getattr(gr.regularizers, name), Regularizer) for name in public)


EVERY_MODEL = pytest.mark.parametrize(
    ("case", "make_model", "make_batch"),
    [
        pytest.param(case, make_model, make_batch, id=f"{case.name}-{name}" if name else case.name)
        for case in CASES
        if case.derivative_of_value
        for name, make_model, make_batch in [("", case.make_model, case.make_batch), *case.more_models]
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
def test_additive_penalties_add_up_over_parts(case: RegularizerCase) -> None:
    """What distributed training averages: of an additive penalty, the mean (or sum) over parts is the whole."""
    model, batch, regularizer = case.make_model(), case.make_batch(), case.make()
    if not regularizer.additive:
        pytest.skip("declared as not additive")
    n = len(batch)
    parts = [(regularizer(model, batch[rows]), len(rows)) for rows in ([0], list(range(1, n)))]
    weights = [size / n if case.invariant_to_duplicates else 1 for _, size in parts]
    total = sum(weight * value for weight, (value, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(total, regularizer(model, batch), rtol=1e-12, atol=1e-14)


@EVERY
def test_a_penalty_that_reads_targets_says_so(case: RegularizerCase) -> None:
    batch = case.make_batch()
    bare = gr.Batch(batch.inputs, groups=batch.groups, extras=batch.extras)
    regularizer = case.make()
    if regularizer.needs_targets:
        with pytest.raises(gr.GradregError, match=f"{type(regularizer).__name__} needs targets"):
            regularizer(case.make_model(), bare)
    else:
        assert regularizer(case.make_model(), bare).dim() == 0


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
