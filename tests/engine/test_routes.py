"""Every route gives the numbers of the naive reference, in the first and the second derivative, on the whole zoo."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradreg.batch import Batch
from gradreg.engine import gradients, plan
from gradreg.errors import GradregWarning, RouteError, SlowRouteWarning
from gradreg.testing import reference, zoo
from gradreg.testing.compare import assert_same
from gradreg.wrt import Params, as_wrt

ROUTES = ("auto", "capture", "vmap", "batch", "loop")


def combinations(*, only_params: bool = False) -> list[Any]:
    """Every case with every variable; a test goes through the routes itself, for they share one truth."""
    found = []
    for case in zoo.CASES:
        if "random" in case.tags:
            continue
        for key, wrt in case.wrts.items():
            if only_params and not all(isinstance(item, Params) for item in as_wrt(wrt)):
                continue
            found.append(pytest.param(case, key, id=f"{case.name}-{key}"))
    return found


@contextlib.contextmanager
def said(**options: Any) -> Iterator[None]:
    """Name the options in a failure."""
    try:
        yield
    except BaseException as problem:
        problem.add_note(f"with {options}")
        raise


def promised(case: zoo.Case, key: str, route: str, per: str = "example") -> bool:
    """Whether this route must work; the others may refuse."""
    kinds = {isinstance(item, Params) for item in as_wrt(case.wrts[key])}
    if route == "auto":
        return True
    if route == "loop":  # one example alone has no batch statistics; sums need no loop
        return "batch_statistics" not in case.tags and not (True in kinds and per != "example")
    if route == "capture":
        return kinds == {False}
    if route == "vmap":
        return kinds == {True} and per == "example" and not case.tags & {"no_vmap", "batch_statistics"}
    return kinds == {True} and per != "example"


@functools.cache
def truths(name: str, variable: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients and the second derivative, from one naive loop."""
    case, first = zoo.case(name), {}

    def kept(*args: Any, **options: Any) -> dict[str, Tensor]:
        first.update(reference.gradients(*args, **options))
        return first

    arguments = case.make_model(), case.make_batch(), case.of, case.wrts[variable]
    second = reference.second_derivative(*arguments, seed=3, gradients=kept)
    return {key: value.detach() for key, value in first.items()}, second


def summed(rows: dict[str, Tensor], batch: Batch, per: str, mean: bool) -> dict[str, Tensor]:
    """Sums or averages of the examples' gradients, over the batch or over each group."""
    reduce = torch.mean if mean else torch.sum
    if per == "batch":
        return {key: reduce(value, 0) for key, value in rows.items()}
    parts = [batch.groups == group for group in sorted(set(batch.groups.tolist()))]
    return {key: torch.stack([reduce(value[part], 0) for part in parts]) for key, value in rows.items()}


def quietly(call: Any, *args: Any, must: bool = True, **options: Any) -> Any:
    """Call without warnings of gradreg; None where a route that promises nothing refuses with a reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradregWarning)
        try:
            return call(*args, **options)
        except RouteError:
            if must:
                raise
            return None


def checked_plan(case: zoo.Case, key: str, truth: dict[str, Tensor]) -> str:
    """The route that the plan states, with the size of the result and reasons against the others."""
    chosen = quietly(plan, case.make_model(), case.make_batch(), case.of, case.wrts[key])
    assert chosen.cost > 0
    assert chosen.result_bytes == sum(value.numel() * value.element_size() for value in truth.values())
    assert chosen.route not in chosen.rejected
    assert all(isinstance(reason, str) and reason for reason in chosen.rejected.values())
    assert chosen.route in str(chosen)
    return chosen.route if chosen.route in (*ROUTES, "factors") else "auto"  # a mixture is named otherwise


@pytest.mark.parametrize(("case", "key"), combinations())
def test_values_second_derivatives_and_the_plan(case: zoo.Case, key: str) -> None:
    first, second = truths(case.name, key)
    tolerance = 0.2 if "bfloat16" in case.tags else None  # rounded twice
    fast = functools.partial(reference.second_derivative, gradients=gradients)
    chosen = checked_plan(case, key, first)
    for route in dict.fromkeys((*ROUTES, chosen)):
        must = promised(case, key, route) or route == chosen
        arguments = case.make_model(), case.make_batch(), case.of, case.wrts[key]
        with said(route=route):
            found = quietly(gradients, *arguments, route=route, must=must)
            if found is not None:
                assert_same(found, first)
                assert not any(value.requires_grad for value in found.values())
        with said(route=route, differentiable=True):
            must = promised(case, key, route)
            found = quietly(fast, *arguments, seed=3, route=route, must=must)
            if found is not None:
                assert_same(found, second, tolerance)


@pytest.mark.parametrize(("case", "key"), combinations(only_params=True))
def test_groups_and_batches(case: zoo.Case, key: str) -> None:
    model, batch = case.make_model(), case.make_batch()
    rows = reference.gradients(model, batch, case.of, case.wrts[key])
    for per, mean in itertools.product(("batch",) if batch.groups is None else ("batch", "group"), (False, True)):
        truth = summed(rows, batch, per, mean)
        for route in ("auto", "vmap", "batch", "loop"):
            options = {"per": per, "mean": mean, "route": route}
            with said(**options):
                must = promised(case, key, route, per)
                found = quietly(gradients, model, batch, case.of, case.wrts[key], must=must, **options)
                if found is not None:
                    assert_same(found, truth)


@pytest.mark.parametrize("per", ["group", "batch"])
@pytest.mark.parametrize("name", ["mlp", "five_heads", "residual_reused_norm", "tied_weights"])
def test_groups_and_batches_of_points_and_their_second_derivatives(name: str, per: str) -> None:
    case = zoo.case(name)
    for wrt in case.wrts.values():
        arguments = case.make_model(), case.make_batch(), case.of, wrt
        assert_same(gradients(*arguments, per=per), reference.gradients(*arguments, per=per))
        assert_same(
            reference.second_derivative(*arguments, gradients=gradients, per=per),
            reference.second_derivative(*arguments, per=per),
        )


# the loop takes one example at a time whatever the chunk
@pytest.mark.parametrize(
    ("route", "chunk_size"), [*itertools.product(["auto", "capture", "vmap"], [1, 2, 3, 100]), ("loop", 2)]
)
@pytest.mark.parametrize("name", ["mlp", "five_heads", "ensemble", "token_classifier", "dict_inputs"])
def test_chunks_do_not_change_the_numbers(name: str, route: str, chunk_size: int) -> None:
    case = zoo.case(name)
    for key, wrt in case.wrts.items():
        arguments = case.make_model(), case.make_batch(), case.of, wrt
        options = {"route": route, "chunk_size": chunk_size, "must": promised(case, key, route)}
        found = quietly(gradients, *arguments, **options)
        if found is not None:
            assert_same(found, truths(name, key)[0])


@pytest.mark.parametrize("chunk_size", [1, 2])
def test_chunks_of_per_batch_parameters_and_second_derivatives(chunk_size: int) -> None:
    case = zoo.case("mlp")
    arguments = case.make_model(), case.make_batch(), case.of, case.wrts["params"]
    for per in ("example", "group", "batch"):
        options = {"per": per, "chunk_size": chunk_size}
        assert_same(gradients(*arguments, **options), reference.gradients(*arguments, per=per))
        assert_same(
            reference.second_derivative(*arguments, gradients=gradients, **options),
            reference.second_derivative(*arguments, per=per),
        )


@pytest.mark.parametrize("name", [case.name for case in zoo.cases_with("no_vmap")])
def test_slow_route_is_said_with_its_reason(name: str) -> None:
    case = zoo.case(name)
    if not isinstance(case.wrts.get("params"), Params):
        return
    arguments = case.make_model(), case.make_batch(), case.of, case.wrts["params"]
    with pytest.raises(RouteError, match="vmap"):
        gradients(*arguments, route="vmap")
    with pytest.warns(SlowRouteWarning):
        gradients(*arguments, differentiable=True)
    assert_same(gradients(*arguments), truths(name, "params")[0])  # layer factors need no vmap over the model


def test_a_route_that_cannot_be_taken_is_refused() -> None:
    case = zoo.case("mlp")
    model, batch = case.make_model(), case.make_batch()
    for route, key in [("capture", "params"), ("batch", "params")]:
        with pytest.raises(RouteError, match=route):
            gradients(model, batch, case.of, case.wrts[key], route=route)


def test_plan_knows_what_is_cheap() -> None:
    case = zoo.case("mlp")
    model, batch = case.make_model(), case.make_batch()
    assert plan(model, batch, case.of, case.wrts["inputs"]).route == "capture"
    assert plan(model, batch, case.of, case.wrts["params"]).route == "factors"
    assert plan(model, batch, case.of, case.wrts["params"], differentiable=True).route == "vmap"
    assert plan(model, batch, case.of, case.wrts["params"], per="batch").route == "batch"
    each = plan(model, batch, case.of, case.wrts["params"]).cost
    assert plan(model, batch, case.of, case.wrts["params"], per="batch").cost <= each
    assert plan(model, batch, case.of, case.wrts["params"], route="loop").cost >= each


def test_two_routes_can_differ() -> None:
    """The comparison sees what it shall see: a wrong tie, a detached parameter."""
    case = zoo.case("tied_weights")
    found = gradients(case.make_model(), case.make_batch(), case.of, case.wrts["params"])
    with pytest.raises(AssertionError, match=r"encoder\.weight"):
        assert_same(
            {**found, "encoder.weight": found["encoder.weight"] * (1 + 1e-9)}, truths("tied_weights", "params")[0]
        )
    second = reference.second_derivative(
        case.make_model(),
        case.make_batch(),
        case.of,
        case.wrts["params"],
        seed=3,
        gradients=lambda *args, **options: {key: value.detach() for key, value in gradients(*args, **options).items()},
    )
    with pytest.raises(AssertionError):
        assert_same(second, truths("tied_weights", "params")[1])
    assert torch.isfinite(truths("tied_weights", "params")[1]["encoder.weight"]).all()
