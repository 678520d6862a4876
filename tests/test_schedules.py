"""Schedules: values at their corners, and what they refuse."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradreg.errors import GradregError
from gradreg.schedules import Anneal, Constant, Every, WarmUp, as_schedule, weight_at


def test_corners() -> None:
    assert [Constant(2)(step) for step in (0, 10**6)] == [2.0, 2.0]
    assert [WarmUp(2.0, steps=10, start=5)(step) for step in (0, 5, 10, 15, 99)] == [0.0, 0.0, 1.0, 2.0, 2.0]
    assert [Anneal(2.0, steps=10, final=1.0, start=5)(step) for step in (0, 5, 10, 15, 99)] == [2.0, 2.0, 1.5, 1.0, 1.0]
    assert [Every(3, 2.0)(step) for step in range(4)] == [6.0, 0.0, 0.0, 6.0]
    assert [Every(3, 2.0, rescale=False)(step) for step in range(4)] == [2.0, 0.0, 0.0, 2.0]


@given(k=st.integers(1, 7), weight=st.floats(0, 10), rounds=st.integers(1, 5))
def test_lazy_application_keeps_the_average(k: int, weight: float, rounds: int) -> None:
    total = sum(Every(k, weight)(step) for step in range(k * rounds))
    assert total == pytest.approx(weight * k * rounds)


@given(step=st.integers(0, 1000), steps=st.integers(1, 100), weight=st.floats(0, 10))
def test_they_stay_between_their_ends(step: int, steps: int, weight: float) -> None:
    for schedule in (WarmUp(weight, steps), Anneal(weight, steps)):
        assert -1e-12 <= schedule(step) <= weight + 1e-12


def test_numbers_and_functions() -> None:
    assert as_schedule(3)(7) == 3.0
    assert as_schedule(lambda step: step / 2)(7) == 3.5
    assert copy.deepcopy(Every(2, WarmUp(1.0, 4)))(2) == 1.0


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "1", None, True])
def test_bad_weights(weight: object) -> None:
    with pytest.raises(GradregError, match="finite number from 0"):
        Constant(weight)
    with pytest.raises(GradregError, match=r"'penalty' at step 3.*finite number"):
        weight_at(lambda step: weight, 3, "penalty")


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_bad_steps(steps: object) -> None:
    with pytest.raises(GradregError, match="whole number of steps"):
        WarmUp(1.0, steps)
    with pytest.raises(GradregError, match="whole number of steps"):
        Every(steps, 1.0)
