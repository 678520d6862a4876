"""Sobolev: by the formula, in closed form, and with a teacher."""

from __future__ import annotations

import pytest
import torch

import gradreg as gr
from gradreg.errors import BatchError
from gradreg.regularizers import Sobolev
from tests.point_cases import PERCEPTRON, Architecture
from tests.regularizers.naive import EVERY_ARCHITECTURE, case_of, finite_gradients, linear, random, same, slope, zeroed


@EVERY_ARCHITECTURE
def test_equals_the_formula(architecture: Architecture) -> None:
    penalty, model, batch = case_of("Sobolev", architecture)
    given = batch.extras["derivatives"]
    rows = [
        (slope(model, x, lambda z, c=c: z[c]) - given[i, c]).square().sum()
        for i, x in enumerate(batch.inputs)
        for c in range(3)
    ]
    same(penalty(model, batch), sum(rows) / len(batch))


def test_linear_models_in_closed_form() -> None:
    model, teacher, x = linear(), linear(), random(5, 4)
    given = gr.gradients(teacher, x, gr.all_logits(), gr.Inputs())["inputs"]
    value = Sobolev()(model, gr.Batch(x, extras={"derivatives": given}))
    same(value, (model.weight - teacher.weight).square().sum().detach())


def test_products_with_random_vectors() -> None:
    model, teacher, x, v = PERCEPTRON.model(), PERCEPTRON.model(), random(5, 4), random(5, 3)
    of = gr.scalars.projected("v")
    batch = gr.Batch(x, extras={"v": v})
    batch = batch.with_extras(derivatives=gr.gradients(teacher, batch, of, gr.Inputs())["inputs"])
    rows = [
        slope(model, one, lambda z, i=i: z @ v[i]) - slope(teacher, one, lambda z, i=i: z @ v[i])
        for i, one in enumerate(x)
    ]
    same(Sobolev(of=of)(model, batch), torch.stack(rows).square().sum(1).mean())


def test_one_output_may_leave_out_its_axis() -> None:
    model, x, given = PERCEPTRON.model(1), random(5, 4), random(5, 4)
    narrow = Sobolev()(model, gr.Batch(x, extras={"derivatives": given}))
    same(narrow, Sobolev()(model, gr.Batch(x, extras={"derivatives": given.unsqueeze(1)})).detach())


def test_the_teacher_is_a_constant() -> None:
    model, given = PERCEPTRON.model(1), random(5, 4).requires_grad_()
    Sobolev()(model, gr.Batch(random(5, 4), extras={"derivatives": given})).backward()
    assert given.grad is None


def test_matched_derivatives_give_zero_with_zero_gradient() -> None:
    model, x = PERCEPTRON.model(), PERCEPTRON.inputs(1)
    given = gr.gradients(model, x, gr.all_logits(), gr.Inputs())["inputs"]
    with pytest.warns(gr.ZeroSecondDerivativeWarning):
        value = Sobolev()(model, gr.Batch(x, extras={"derivatives": given}))
    assert value == 0
    finite_gradients(value, model)
    finite_gradients(Sobolev()(zeroed(model), gr.Batch(x, extras={"derivatives": given})), model)


def test_bad_input() -> None:
    with pytest.raises(BatchError, match=r"extras\['derivatives'\] is needed"):
        Sobolev()(linear(), random(5, 4))
    with pytest.raises(BatchError, match=r"\(5, 3, 2\).*\(5, 3, 4\)"):
        Sobolev()(linear(), gr.Batch(random(5, 4), extras={"derivatives": random(5, 3, 2)}))
