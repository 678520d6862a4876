"""The zoo itself: named, described, seeded, and a place for models of one's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import UnknownNameError
from gradreg.testing import zoo


def test_names_are_unique_and_every_case_says_what_it_is_for() -> None:
    names = [case.name for case in zoo.CASES]
    assert len(names) == len(set(names)) > 60
    assert all(case.what and not case.what.endswith(".") for case in zoo.CASES)
    assert len(zoo.table().splitlines()) == len(zoo.CASES)
    assert max(map(len, zoo.table().splitlines())) <= 130


def test_every_tag_is_explained() -> None:
    tags = {tag for case in zoo.CASES for tag in case.tags}
    assert tags
    for tag in tags:
        assert f"`{tag}`" in (zoo.__doc__ or ""), tag


def test_cases_are_the_same_every_time_and_leave_the_random_stream() -> None:
    before = torch.get_rng_state()
    for case in zoo.CASES[::7]:
        first, again = case.make_model().state_dict(), case.make_model().state_dict()
        assert all(torch.equal(first[name], again[name]) for name in first)
        inputs = [case.make_batch().named_inputs() for _ in range(2)]
        assert all(torch.equal(a, inputs[1][name]) for name, a in inputs[0].items() if isinstance(a, Tensor))
    assert torch.equal(before, torch.get_rng_state())


def test_unknown_names_are_met_with_the_closest() -> None:
    with pytest.raises(UnknownNameError, match="tied_weights"):
        zoo.case("tied_weight")


class Bent(torch.autograd.Function):
    """x^2 with a backward that is wrong under vmap only, as a batching rule may be."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**2

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: object, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * cotangent * x

    @staticmethod
    def vmap(info: object, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        return Bent.apply(x) * 1.001, in_dims[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Bent.apply(self.first(x)))


def test_a_case_of_ones_own_is_checked() -> None:
    wrong = zoo.make_case(
        "bent",
        "a wrong batching rule",
        Model,
        lambda data: gr.Batch(data.normal(3)),
        gr.logit(0),
        inputs=gr.Inputs(),
        params=gr.Params("*"),
    )
    with pytest.raises(
        AssertionError, match=r"(?s)bent, params, differentiated again: Gradients differ:.*first\.weight"
    ):
        zoo.check_case(wrong)
    assert wrong.make_model().first.weight.dtype == torch.float64
