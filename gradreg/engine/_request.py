"""A call of the engine, checked and resolved against the model before any work."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.batch import Batch, as_batch
from gradreg.errors import BatchError, GradregError, HeadsError, ScalarError, UnknownNameError, closest
from gradreg.model import (
    Ensemble,
    SharedBase,
    base_features,
    check_compatible,
    check_grad_possible,
    devices_of,
    parameter_aliases,
    preserved,
    unwrap,
)
from gradreg.scalars import AcrossHeads, ScalarFunction, bind
from gradreg.wrt import Activations, Features, Inputs, Outputs, Params, Wrt, as_wrt, match_names

PER = ("example", "group", "batch")
ROUTES = ("auto", "capture", "factors", "vmap", "batch", "loop")
RANDOMNESS = ("different", "same", "error")


@dataclass
class Points:
    """What one forward shall record.

    Attributes:
        inputs: Names of inputs.
        features: Whether the features of a `SharedBase`.
        outputs: Whether the outputs.
        activations: From module name to the axis of examples.
        calls: From module name to the calls that are wanted; absent means all.
        required: Modules named in full, which must be called; those of a glob may be containers that never are.
    """

    inputs: tuple[str, ...] = ()
    features: bool = False
    outputs: bool = False
    activations: dict[str, int] = field(default_factory=dict)
    calls: dict[str, set[int]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.features or self.outputs or self.activations)

    def merged(self, other: Points) -> Points:
        """Return the union."""
        if not self or not other:
            return self or other
        activations = dict(self.activations)
        calls = {name: set(wanted) for name, wanted in self.calls.items()}
        for name, axis in other.activations.items():
            if activations.setdefault(name, axis) != axis:
                raise GradregError(
                    f"Activations({name!r}) is asked for with batch_axis {activations[name]} and {axis}."
                )
            if name in self.activations and name in calls and name in other.calls:
                calls[name] |= other.calls[name]
            elif name in self.activations and name in calls:
                del calls[name]
            elif name not in self.activations and name in other.calls:
                calls[name] = set(other.calls[name])
        return Points(
            tuple(dict.fromkeys(self.inputs + other.inputs)),
            self.features or other.features,
            self.outputs or other.outputs,
            activations,
            calls,
            self.required | other.required,
        )

    def covers(self, other: Points) -> bool:
        """Whether all that the other wants is recorded here."""
        return (
            set(other.inputs) <= set(self.inputs)
            and self.features >= other.features
            and self.outputs >= other.outputs
            and all(self.activations.get(name) == axis for name, axis in other.activations.items())
            and all(
                name not in self.calls or other.calls.get(name, {-1}) <= self.calls[name] for name in other.activations
            )
        )


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


def resolve_points(inner: nn.Module, batch: Batch, wrt: tuple[Wrt, ...]) -> Points:
    """Resolve names and globs to what the forward shall record.

    Raises:
        BatchError: If an input cannot be differentiated.
        HeadsError: If features are asked of a model without a shared base.
        UnknownNameError: If a name or glob matches nothing.
    """
    points = Points()
    for item in wrt:
        if isinstance(item, Inputs):
            points = points.merged(Points(inputs=_inputs(batch, item.name)))
        elif isinstance(item, Features):
            if not isinstance(inner, SharedBase):
                if type(inner).__name__ == "OptimizedModule":
                    raise HeadsError(
                        "Features() needs a SharedBase; a compiled one hides it. Pass the uncompiled model (model._orig_mod)."
                    )
                raise HeadsError(
                    f"Features() needs a SharedBase; the model is: {type(inner).__name__}. Use Inputs(), or "
                    'Activations("<module>") for the output of one of its modules.'
                )
            points = points.merged(Points(features=True))
        elif isinstance(item, Outputs):
            points = points.merged(Points(outputs=True))
        elif isinstance(item, Activations):
            points = points.merged(_activations(inner, item))
    return points


def resolve_params(inner: nn.Module, wrt: tuple[Wrt, ...]) -> dict[str, nn.Parameter]:
    """Resolve globs to trainable parameters by their first names.

    Raises:
        UnknownNameError: If a glob matches no parameter, or frozen ones only.
    """
    globs = [item.glob for item in wrt if isinstance(item, Params)]
    if not globs:
        return {}
    aliases = parameter_aliases(inner)
    named = dict(inner.named_parameters())
    wanted: set[str] = set()
    for glob in globs:
        matched = {aliases[name] for name in match_names(glob, aliases, "parameter")}
        trainable = {name for name in matched if named[name].requires_grad}
        if not trainable:
            raise UnknownNameError(
                f"Params({glob!r}) matches frozen parameters only ({closest(glob, matched)}); gradients are taken with "
                "respect to parameters with requires_grad=True."
            )
        wanted |= trainable
    return {name: parameter for name, parameter in named.items() if name in wanted}


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
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise GradregError(f"chunk_size={chunk_size!r}; allowed are None and integers from 1.")
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


def _inputs(batch: Batch, name: str | None) -> tuple[str, ...]:
    named = batch.named_inputs()
    if name is None:
        found = tuple(key for key, value in named.items() if isinstance(value, Tensor) and value.is_floating_point())
        if not found:
            kinds = ", ".join(f"{key}: {getattr(value, 'dtype', type(value).__name__)}" for key, value in named.items())
            raise BatchError(f"Inputs() finds no floating-point input ({kinds}).{_hint(*named.values())}")
        return found
    if name not in named:
        raise UnknownNameError(f"The batch has no input {name!r}; its inputs are {closest(name, named)}.")
    value = named[name]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise BatchError(f"Input {name!r} is {kind} and cannot be differentiated.{_hint(value)}")
    return (name,)


def _hint(*values: Any) -> str:
    if any(isinstance(value, Tensor) and value.is_complex() for value in values):
        return (
            " Gradients with respect to complex inputs are not per-entry derivatives: give the model real and imaginary parts, "
            "torch.view_as_real(x), and let it join them."
        )
    return (
        " Integer inputs such as token ids have no gradient: differentiate with respect to an activation behind the embedding, "
        'for example Activations("<embedding module>").'
    )


def _activations(inner: nn.Module, item: Activations) -> Points:
    glob, _, call = item.glob.partition("#")
    if call and not call.isdigit():
        raise GradregError(f"Activations({item.glob!r}): behind # stands the number of the call, counted from 0.")
    names = [name for name, _ in inner.named_modules(remove_duplicate=False) if name]
    matched = match_names(glob, names, "module")
    modules = dict(inner.named_modules(remove_duplicate=False))
    first: dict[int, str] = {}
    for name in names:
        first.setdefault(id(modules[name]), name)
    found = dict.fromkeys((first[id(modules[name])] for name in matched), item.batch_axis)
    literal = frozenset(found) if not set("*?") & set(glob) else frozenset()
    return Points(activations=found, calls={name: {int(call)} for name in found} if call else {}, required=literal)


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
