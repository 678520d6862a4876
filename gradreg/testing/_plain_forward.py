"""One plain forward of a model that records the variables to differentiate by: hooks and clones, nothing clever."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradreg.batch import Batch, map_tensors
from gradreg.errors import BatchError, CompatibilityError, GradregError
from gradreg.model import Ensemble, SharedBase
from gradreg.scalars import read_outputs
from gradreg.wrt import Activations, Features, Inputs, Outputs, Params, Wrt, compile_glob, match_names


class PlainWeightNorm(TorchFunctionMode):
    """Weight normalization by its formula: the second derivative of torch's kernel is wrong in the direction (2.13)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Answer the kernel's calls; pass all others on."""
        if func is not torch._weight_norm:
            return func(*args, **(kwargs or {}))
        v, g, dim = (*args, 0)[:3]
        return v * g / torch.linalg.vector_norm(v, dim=[axis for axis in range(v.dim()) if axis != dim], keepdim=True)


@dataclass
class Point:
    """A variable to differentiate with respect to: one tensor, or one copy for every head.

    `batch_axis` is the axis that runs over examples, None for parameters, which belong to no example.
    """

    copies: list[Tensor]
    batch_axis: int | None = 0

    def of_head(self, head: int) -> Tensor:
        return self.copies[head] if len(self.copies) > 1 else self.copies[0]


@dataclass
class Forward:
    """One plain forward: the outputs of every head (of the model itself without heads), and what was recorded."""

    outputs: list[Any]
    has_heads: bool
    batch: Batch  # as `of` reads it: its inputs are the variables, so a scalar of outputs and inputs has both paths
    points: dict[str, Point] = field(default_factory=dict)


def run(
    model: nn.Module,
    batch: Batch,
    items: tuple[Wrt, ...],
    at: dict[str, Tensor],
    differentiable: bool,
    mixes_heads: bool,
    output: str | int | None,
) -> Forward:
    """Run the model once, head by head, and record every variable that was asked for."""
    at = {name: _differentiable(value) for name, value in at.items()}
    points = _parameter_points(model, items, at)
    batch = _input_points(batch, items, at, differentiable, points)
    # clones, because a model may change its inputs in place
    named = {name: map_tensors(torch.clone, value) for name, value in batch.named_inputs().items()}
    args, kwargs = ([], named) if isinstance(batch.inputs, Mapping) else (list(named.values()), {})
    with (
        _recorded_activations(model, items, at, points, len(batch)),
        _parameters_at(model, {name: value for name, value in at.items() if name in points}),
    ):
        if not isinstance(model, (SharedBase, Ensemble)):
            outputs = [_call(model, args, kwargs)]
        elif isinstance(model, Ensemble):
            outputs = [_call(member, args, kwargs) for member in model.models]
        else:
            features = _differentiable(at.get("features", model.features(*args, **kwargs)))
            # clones, because a head whose first layer works in place would rewrite the features of the next one
            copies = [features.clone() for _ in model.heads]
            if any(isinstance(item, Features) for item in items):
                points["features"] = Point([features] if mixes_heads else copies)
            outputs = [head(copy) for head, copy in zip(model.heads, [copy.clone() for copy in copies], strict=True)]
    has_heads = isinstance(model, (SharedBase, Ensemble))
    if mixes_heads and has_heads:
        outputs = [torch.stack(outputs, 1)]
    if any(isinstance(item, Features) for item in items) and "features" not in points:
        raise CompatibilityError("Features() are the output of the base of a SharedBase; this model has none.")
    if any(isinstance(item, Outputs) for item in items):
        outputs, points["outputs"] = _output_points(outputs, at.get("outputs"), output)
    unknown = sorted(set(at) - set(points))
    if unknown:
        raise GradregError(f"at has the keys {unknown}, which are not among those of wrt: {sorted(points)}.")
    return Forward(outputs, has_heads, batch, points)


def _call(model: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call with keywords, or with one mapping where the model does not know the names."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return model(kwargs)
    return model(*args, **kwargs)


def _differentiable(value: Tensor) -> Tensor:
    """The value itself where it is part of a graph, else a leaf made from it."""
    return value if value.requires_grad else value.detach().clone().requires_grad_()


def _parameter_points(model: nn.Module, items: tuple[Wrt, ...], at: Mapping[str, Tensor]) -> dict[str, Point]:
    """Trainable parameters by their first name, matched by any of their names."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    every_name = {
        name: first_names[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    matched = {
        every_name[m]
        for item in items
        if isinstance(item, Params)
        for m in match_names(item.glob, every_name, "parameter")
    }
    names = [name for name in first_names.values() if name in matched]
    return {name: Point([at.get(name, model.get_parameter(name))], batch_axis=None) for name in names}


def _input_points(
    batch: Batch, items: tuple[Wrt, ...], at: Mapping[str, Tensor], differentiable: bool, points: dict[str, Point]
) -> Batch:
    """The batch in which the wanted inputs are variables of our own."""
    wanted = {item.name for item in items if isinstance(item, Inputs)}
    named = batch.named_inputs()
    for name in wanted - {None}:
        value = named.get(str(name))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise BatchError(f"There is no floating-point input {name!r}.")
    if None in wanted:
        floating = {name for name, value in named.items() if isinstance(value, Tensor) and value.is_floating_point()}
        if not floating:
            raise BatchError("There is no floating-point input.")
        wanted |= floating
    for name, value in named.items():
        if not isinstance(value, Tensor):
            continue
        value = at.get(name, value) if name in wanted else value
        if not differentiable:
            value = value.detach()
        if name in wanted:
            value = value.clone() if value.requires_grad else value.detach().clone().requires_grad_()
            points[name] = Point([value])
        named[name] = value
    return batch.with_inputs(named)


@contextlib.contextmanager
def _recorded_activations(
    model: nn.Module, items: tuple[Wrt, ...], at: Mapping[str, Tensor], points: dict[str, Point], n: int
) -> Iterator[None]:
    """Record the outputs of the matching modules by plain forward hooks."""
    wanted = [item for item in items if isinstance(item, Activations)]
    calls: dict[str, int] = {}
    recorded: dict[tuple[str, int], Point] = {}

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        name = names[module][0]
        call = calls[name] = calls.get(name, -1) + 1
        axis = next((item.batch_axis for item in wanted if _matches(item.glob, names[module], call)), None)
        if axis is None:
            return None
        value = _first_tensor(output)
        for key in (name, f"{name}#{call}"):
            if key in at:
                value = at[key].movedim(0, axis)
        value = _differentiable(value)
        if value.shape[axis] != n:
            raise CompatibilityError(
                f"Axis {axis} of {name!r} has length {value.shape[axis]}, but there are {n} examples."
            )
        recorded[name, call] = Point([value], axis)
        return _with_first_tensor(output, value.clone())  # the next module may work in place

    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if wanted and name:
            names.setdefault(module, []).append(name)
    handles = [module.register_forward_hook(hook) for module in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for (name, call), point in recorded.items():
        points[f"{name}#{call}" if calls[name] else name] = point
    for item in wanted:
        if not any(
            _matches(item.glob, aliases, call)
            for aliases in names.values()
            for name, call in recorded
            if name in aliases
        ):
            match_names(item.glob, [], "module that is called in the forward")


def _matches(glob: str, names: list[str], call: int) -> bool:
    pattern = compile_glob(glob)
    return any(pattern.fullmatch(name) or pattern.fullmatch(f"{name}#{call}") for name in names)


def _first_tensor(output: Any) -> Tensor:
    found: list[Tensor] = []

    def remember(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(remember, output)
    if not found:
        raise CompatibilityError(f"A module that was asked for returned a {type(output).__name__} without a tensor.")
    return found[0]


def _with_first_tensor(output: Any, value: Tensor) -> Any:
    replaced = iter([value])
    return map_tensors(lambda tensor: next(replaced, tensor), output)


def _output_points(outputs: list[Any], value: Tensor | None, output: str | int | None) -> tuple[list[Any], Point]:
    """The tensors that `of` reads, as variables; `value` replaces them, `[n, ...]` or with heads `[n, K, ...]`."""
    if value is not None:
        outputs = list(value.unbind(1)) if len(outputs) > 1 else [value]
    if all(isinstance(item, Tensor) for item in outputs):
        outputs = [_differentiable(item) for item in outputs]
    return outputs, Point([read_outputs(item, output) for item in outputs])


@contextlib.contextmanager
def _parameters_at(model: nn.Module, at: Mapping[str, Tensor]) -> Iterator[None]:
    """Put other values in the place of parameters, under all their names, for the time of the forward."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    swapped = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and canonical[id(parameter)] in at:
                swapped.append((module, name, parameter))
    try:
        for module, name, parameter in swapped:
            module._parameters[name] = at[canonical[id(parameter)]]  # type: ignore[assignment]  # a plain tensor for a while
            _refresh(module)
        yield
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter
            _refresh(module)


def _refresh(module: nn.Module) -> None:
    """Recurrent layers read their weights from a list of their own."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


@contextlib.contextmanager
def nothing_changed(model: nn.Module) -> Iterator[None]:
    """Give buffers and the random state back as they were."""
    random_state = torch.get_rng_state()
    kept = [(module, dict(module._buffers)) for module in model.modules()]
    copies = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    try:
        # the forward works on copies: writing values back later would break graphs that saved the buffers
        for module, buffers in kept:
            module._buffers.update({name: copies[id(b)] for name, b in buffers.items() if b is not None})
        yield
    finally:
        torch.set_rng_state(random_state)
        for module, buffers in kept:
            module._buffers.clear()
            module._buffers.update(buffers)
