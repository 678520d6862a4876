"""A call of the engine, checked and resolved against the model before any work."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.batch import Batch, as_batch, check_chunk_size
from gradreg.engine._points import Points, resolve_params, resolve_points
from gradreg.engine._tokens import prepared
from gradreg.errors import BatchError, GradregError, ScalarError, UnknownNameError, closest
from gradreg.model import (
    Ensemble,
    SharedBase,
    base_features,
    check_compatible,
    check_grad_possible,
    devices_of,
    preserved,
    unwrap,
)
from gradreg.scalars import AcrossHeads, ScalarFunction, bind
from gradreg.wrt import Wrt, as_wrt

PER = ("example", "group", "batch")
ROUTES = ("auto", "capture", "factors", "vmap", "batch", "loop")
RANDOMNESS = ("different", "same", "error")


@dataclass
class Request:
    """A resolved call of the engine."""

    model: nn.Module
    inner: nn.Module
    batch: Batch
    of: ScalarFunction
    wrt: tuple[Wrt, ...]
    points: Points
    params: dict[str, nn.Parameter]
    per: str = "example"
    mean: bool = False
    at: dict[str, Tensor] = field(default_factory=dict)
    differentiable: bool = False
    randomness: str = "different"
    chunk_size: int | None = None
    route: str = "auto"

    @property
    def heads(self) -> int | None:
        """The number of heads, or None for a model without heads."""
        return head_count(self.inner)

    @property
    def over_heads(self) -> bool:
        """Whether results have an axis of heads."""
        return self.heads is not None and not isinstance(self.of, AcrossHeads)

    def at_params(self) -> dict[str, Tensor]:
        """The values that stand in for parameters."""
        return {name: value for name, value in self.at.items() if name in self.params}

    def at_points(self) -> dict[str, Tensor]:
        """The values that stand in for inputs, features and activations."""
        return {name: value for name, value in self.at.items() if name not in self.params}


def head_count(model: nn.Module) -> int | None:
    """Return the number of heads of a `SharedBase` or `Ensemble`, else None."""
    if isinstance(model, SharedBase):
        return len(model.heads)
    return len(model.models) if isinstance(model, Ensemble) else None


def resolve(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    *,
    per: str = "example",
    mean: bool = False,
    at: Mapping[str, Tensor] | None = None,
    differentiable: bool = False,
    randomness: str = "different",
    chunk_size: int | None = None,
    route: str = "auto",
) -> Request:
    """Check the arguments of a call and resolve them against the model.

    Raises:
        BatchError: If the batch or its groups do not fit.
        GradregError: If an option has no such value.
    """
    for name, value, allowed in (("per", per, PER), ("route", route, ROUTES), ("randomness", randomness, RANDOMNESS)):
        if value not in allowed:
            raise GradregError(f"{name}={value!r}; allowed are {', '.join(map(repr, allowed))}.")
    check_chunk_size(chunk_size)
    if not callable(of):
        raise GradregError(
            f"of={of!r} is not callable; use logit(i), loss(fn), ... or a function (outputs, batch) -> [n]."
        )
    _check_callable(of)
    if at is not None and not isinstance(at, Mapping):
        raise GradregError(f"at must be a mapping from result keys to values, found a {type(at).__name__}.")
    check_compatible(model, differentiable=differentiable)
    check_grad_possible(unwrap(model))
    batch = as_batch(batch)
    if per == "group" and batch.groups is None:
        raise BatchError('per="group" needs Batch.groups, the integer group of every example.')
    if mean and per == "example":
        raise GradregError('mean=True averages over examples; it needs per="group" or per="batch".')
    inner = unwrap(model)
    batch = prepared(inner, batch)
    items = as_wrt(wrt)
    request = Request(
        model,
        inner,
        batch,
        bind(of, inner),
        items,
        resolve_points(inner, batch, items),
        resolve_params(inner, items),
        per,
        mean,
        dict(at or {}),
        differentiable,
        randomness,
        chunk_size,
        route,
    )
    _check_at(request)
    if "features" in request.at:
        _check_features(request)
    return request


# Types of scalars that were found to take two arguments: reading a signature costs as much as a small forward
_CALLABLE: set[type] = set()


def _check_callable(of: ScalarFunction) -> None:
    if type(of) in _CALLABLE:
        return
    try:
        inspect.signature(of).bind(None, None)
    except ValueError:
        return  # a builtin without a signature
    except TypeError as problem:
        raise ScalarError(f"of={of!r} is called as of(outputs, batch): {problem}.") from problem
    if not inspect.isroutine(of) and not isinstance(of, nn.Module | partial | type):
        _CALLABLE.add(type(of))


def _check_at(request: Request) -> None:
    known = {*request.points.inputs, *request.params}
    known |= {"features"} if request.points.features else set()
    for name, value in request.at.items():
        base = name.partition("#")[0]
        if name not in known and base not in request.points.activations:
            options = [*known, *request.points.activations]
            raise UnknownNameError(f"at holds {name!r}, which is not among wrt; allowed are {closest(name, options)}.")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise GradregError(f"at[{name!r}] must be a floating-point tensor, found {_kind(value)}.")
        if name in request.params and value.shape != request.params[name].shape:
            raise GradregError(
                f"at[{name!r}] has shape {tuple(value.shape)}; the parameter has {tuple(request.params[name].shape)}."
            )
        if name in request.points.inputs:
            expected = request.batch.named_inputs()[name].shape
            if value.shape[:1] != expected[:1]:
                raise GradregError(
                    f"at[{name!r}] has shape {tuple(value.shape)}; the batch has {expected[0]} examples."
                )


def _check_features(request: Request) -> None:
    """Compare the shape of given features with that of the base's, from one example."""
    with torch.no_grad(), preserved(request.inner, devices_of(request.inner)):
        own = base_features(request.inner, request.batch[:1]).shape[1:]
    given = request.at["features"]
    if given.shape != (len(request.batch), *own):
        raise GradregError(
            f"at['features'] has shape {tuple(given.shape)}; the features are {(len(request.batch), *own)}."
        )


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
