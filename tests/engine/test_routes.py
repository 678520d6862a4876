"""Every route gives the numbers of the naive reference, in the first and the second derivative, on the whole zoo."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from gradreg.engine import gradients, plan
from gradreg.errors import GradregWarning, RouteError, SlowRouteWarning
from gradreg.testing import reference, zoo
from gradreg.testing.compare import assert_same
from gradreg.wrt import Params, as_wrt

ROUTES = ("auto", "capture", "vmap", "batch", "loop")


def combinations(*, routes: tuple[str, ...] = ROUTES, only_params: bool = False) -> list[Any]:
    """Every case with every variable and route."""
    found = []
    for case in zoo.CASES:
        if "random" in case.tags:
            continue
        for key, wrt in case.wrts.items():
            if only_params and not all(isinstance(item, Params) for item in as_wrt(wrt)):
                continue
            for route in routes:
                found.append(pytest.param(case, key, route, id=f"{case.name}-{key}-{route}"))
    return found


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
def truth(name: str, key: str, per: str = "example", mean: bool = False) -> dict[str, Tensor]:
    case = zoo.case(name)
    return reference.gradients(case.make_model(), case.make_batch(), case.of, case.wrts[key], per=per, mean=mean)


@functools.cache
def second_truth(name: str, key: str) -> dict[str, Tensor]:
    case = zoo.case(name)
    return reference.second_derivative(case.make_model(), case.make_batch(), case.of, case.wrts[key], seed=3)


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


@pytest.mark.parametrize(("case", "key", "route"), combinations())
def test_values(case: zoo.Case, key: str, route: str) -> None:
    arguments = case.make_model(), case.make_batch(), case.of, case.wrts[key]
    found = quietly(gradients, *arguments, route=route, must=promised(case, key, route))
    if found is not None:
        assert_same(found, truth(case.name, key))
        assert not any(value.requires_grad for value in found.values())


@pytest.mark.parametrize(("case", "key", "route"), combinations())
def test_second_derivatives(case: zoo.Case, key: str, route: str) -> None:
    arguments = case.make_model(), case.make_batch(), case.of, case.wrts[key]
    fast = functools.partial(reference.second_derivative, gradients=gradients)
    found = quietly(fast, *arguments, seed=3, route=route, must=promised(case, key, route))
    if found is not None:
        tolerance = 0.2 if "bfloat16" in case.tags else None  # rounded twice
        assert_same(found, second_truth(case.name, key), tolerance)


@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("per", ["group", "batch"])
@pytest.mark.parametrize(
    ("case", "key", "route"), combinations(routes=("auto", "vmap", "batch", "loop"), only_params=True)
)
def test_groups_and_batches(case: zoo.Case, key: str, route: str, per: str, mean: bool) -> None:
    model, batch = case.make_model(), case.make_batch()
    if per == "group" and batch.groups is None:
        return
    must = promised(case, key, route, per)
    options = {"per": per, "mean": mean, "route": route}
    found = quietly(gradients, model, batch, case.of, case.wrts[key], must=must, **options)
    if found is not None:
        assert_same(found, truth(case.name, key, per, mean))


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


@pytest.mark.parametrize("route", ["auto", "capture", "vmap", "loop"])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 100])
@pytest.mark.parametrize("name", ["mlp", "five_heads", "ensemble", "token_classifier", "dict_inputs"])
def test_chunks_do_not_change_the_numbers(name: str, chunk_size: int, route: str) -> None:
    case = zoo.case(name)
    for key, wrt in case.wrts.items():
        arguments = case.make_model(), case.make_batch(), case.of, wrt
        options = {"route": route, "chunk_size": chunk_size, "must": promised(case, key, route)}
        found = quietly(gradients, *arguments, **options)
        if found is not None:
            assert_same(found, truth(name, key))


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
    assert_same(gradients(*arguments), truth(name, "params"))  # layer factors need no vmap over the model


def test_a_route_that_cannot_be_taken_is_refused() -> None:
    case = zoo.case("mlp")
    model, batch = case.make_model(), case.make_batch()
    for route, key in [("capture", "params"), ("batch", "params")]:
        with pytest.raises(RouteError, match=route):
            gradients(model, batch, case.of, case.wrts[key], route=route)


@pytest.mark.parametrize(("case", "key", "route"), combinations(routes=("auto",)))
def test_plan_states_the_route_and_the_size(case: zoo.Case, key: str, route: str) -> None:
    arguments = case.make_model(), case.make_batch(), case.of, case.wrts[key]
    chosen = quietly(plan, *arguments)
    assert chosen.route in ROUTES[1:] or chosen.route  # a mixture may be named otherwise
    assert chosen.cost > 0
    assert chosen.result_bytes == sum(value.numel() * value.element_size() for value in truth(case.name, key).values())
    assert chosen.route not in chosen.rejected
    assert all(isinstance(reason, str) and reason for reason in chosen.rejected.values())
    assert chosen.route in str(chosen)
    if chosen.route in (*ROUTES, "factors"):
        assert_same(quietly(gradients, *arguments, route=chosen.route), truth(case.name, key))


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
        assert_same({**found, "encoder.weight": found["encoder.weight"] * (1 + 1e-9)}, truth("tied_weights", "params"))
    second = reference.second_derivative(
        case.make_model(),
        case.make_batch(),
        case.of,
        case.wrts["params"],
        seed=3,
        gradients=lambda *args, **options: {key: value.detach() for key, value in gradients(*args, **options).items()},
    )
    with pytest.raises(AssertionError):
        assert_same(second, second_truth("tied_weights", "params"))
    assert torch.isfinite(second_truth("tied_weights", "params")["encoder.weight"]).all()
