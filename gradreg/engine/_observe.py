"""One forward that records wanted points, replaces them, or shifts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.utils import _pytree as pytree

from gradreg.batch import Batch, substituted
from gradreg.engine._request import Points
from gradreg.engine._scale import is_scaled
from gradreg.errors import CompatibilityError, GradregError, UnknownNameError, closest
from gradreg.model import (
    Ensemble,
    SharedBase,
    Tap,
    all_modules,
    call,
    differentiable_kernels,
    tapped,
    train_mode_batch_norms,
    unwrap,
)
from gradreg.scalars import AcrossHeads, ScalarFunction, check_scalar, scalar_key


@dataclass
class Recorded:
    """An activation recorded in the forward.

    Attributes:
        tensor: The tensor that the model goes on with.
        batch_axis: Its axis of examples.
        head: The head in whose run it was recorded, if any.
        source: What the module was given, where that is one tensor.
        version: How often that had been written to.
    """

    tensor: Tensor
    batch_axis: int = 0
    head: int | None = None
    source: Tensor | None = None
    version: int = 0


@dataclass
class Capture:
    """One forward with what it recorded.

    Attributes:
        outputs: What the model returned; with heads `[n, K, ...]`.
        batch: The batch it ran on, with inputs as the model saw them.
        inputs: The recorded inputs.
        activations: The recorded activations, by module name or `name#k`.
        copies: Per shared input of the heads what each head read: `[K, n, ...]` or a list.
        sources: The shared inputs before they were copied.
        normalized: From the graph node of every train-mode BatchNorm output to the module's name.
        fused: A scalar and its gradient at the features, where they came with the forward.
    """

    outputs: Any
    batch: Batch
    inputs: dict[str, Tensor] = field(default_factory=dict)
    activations: dict[str, Recorded] = field(default_factory=dict)
    copies: dict[str, Tensor | list[Tensor]] = field(default_factory=dict)
    sources: dict[str, Tensor] = field(default_factory=dict)
    normalized: dict[Any, str] = field(default_factory=dict)
    fused: tuple[ScalarFunction, Tensor] | None = None


def attached(tensor: Tensor, *, keep_graph: bool) -> Tensor:
    """Return a tensor to differentiate with respect to: an alias in the caller's graph, or a leaf of our own."""
    if tensor.is_inference():
        tensor = tensor.clone()  # made under inference_mode, where nothing can be saved for a backward
    if keep_graph and tensor.requires_grad:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_()


def usable(batch: Batch) -> Batch:
    """Return the batch without tensors made under inference_mode, which no graph can hold."""
    if not any(tensor.is_inference() for tensor in batch.tensors()):
        return batch
    return batch.map(lambda tensor: tensor.clone() if tensor.is_inference() else tensor)


@contextmanager
def grad_mode() -> Iterator[None]:
    """Enable gradients whatever surrounds the call: `no_grad`, `inference_mode`.

    Yields:
        Nothing.
    """
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.enable_grad():
        yield


def observe(
    model: nn.Module,
    batch: Batch,
    points: Points,
    *,
    at: Mapping[str, Tensor] | None = None,
    shift: Mapping[str, Tensor] | None = None,
    differentiable: bool = False,
    transformed: bool = False,
    copies: bool = True,
    protect: bool = True,
    fuse: ScalarFunction | None = None,
    heads_apart: bool = False,
    modules: list[nn.Module] | None = None,
) -> Capture:
    """Run the model once and record the wanted points.

    Args:
        model: The model as the user calls it, wrappers included.
        batch: The batch.
        points: What to record.
        at: Values that stand in for points.
        shift: Values that are added to points (tangents of a jvp).
        differentiable: Whether kernels must be twice differentiable and attached inputs stay attached.
        transformed: Whether a transform of torch.func surrounds the call; points then stay as they are.
        copies: Whether heads get copies of their own of the wanted shared inputs.
        protect: Whether the caller's inputs are kept from layers that work in place.
        fuse: A scalar that is the only one wanted; its gradient at the features of equal heads comes with the forward.
        heads_apart: Whether heads run one by one, so that hooks inside them see ordinary tensors.
        modules: The modules of the model without wrappers, where they are known already.

    Returns:
        The outputs and the recorded points.

    Raises:
        UnknownNameError: If a value in `at` or `shift` belongs to a call of a module that did not happen.
        CompatibilityError: If a wanted module was not called or gives no floating-point tensor.
    """
    inner = unwrap(model)
    modules = all_modules(inner) if modules is None else modules
    at, shift = dict(at or {}), dict(shift or {})
    batch = usable(batch)
    capture = Capture(None, batch)
    values: dict[str, Any] = {}
    named = batch.named_inputs()
    for name, value in named.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        value = at.get(name, value)
        if name in points.inputs and not transformed:
            capture.inputs[name] = value = attached(value, keep_graph=differentiable)
            value = value.clone()  # a first layer that works in place must not change the recorded tensor
        elif protect:
            value = value.clone()  # nor the caller's
        values[name] = value + shift[name] if name in shift else value
    if any(value is not named[name] for name, value in values.items()):
        capture.batch = substituted(batch, values)
    tap = _make_tap(inner, batch, points, at, shift, copies=copies and not transformed, keep_graph=differentiable)
    if tap is not None and heads_apart:
        tap.one_by_one = True
    only = isinstance(inner, SharedBase) and not isinstance(fuse, AcrossHeads) and points == Points(features=True)
    if tap is not None and fuse is not None and differentiable and not at and only and not is_scaled():
        tap.fused, tap.scalar = _fusion(fuse, capture.batch), scalar_key(fuse)
    recorder = _Recorder(points, at, shift, tap, differentiable, transformed)
    twice = differentiable or transformed
    try:
        recorder.attach(inner, modules)
        with tapped(tap), differentiable_kernels(inner, twice=twice, written_out=differentiable, modules=modules):
            outputs = call(model, capture.batch)
    finally:
        recorder.remove()
    capture.activations = recorder.named()
    capture.normalized = recorder.normalized
    capture.outputs = _outputs(outputs, points)
    if tap is not None and tap.run is not None:
        capture.copies, capture.sources = tap.run.copies, tap.sources
        if tap.run.gradients is not None and fuse is not None:
            capture.fused = (fuse, tap.run.gradients)
    return capture


def _fusion(of: ScalarFunction, batch: Batch) -> Callable[[Callable[[Tensor], Any]], Any]:
    """Return the transform that turns a head into its gradient and its outputs."""

    def transform(head: Callable[[Tensor], Any]) -> Any:
        def scalar(features: Tensor) -> tuple[Tensor, Any]:
            outputs = head(features)
            values = check_scalar(of(outputs, batch), len(batch), of)
            if values.dim() != 1:
                raise RuntimeError("several targets need a pullback each")
            return values.sum(), outputs

        return grad(scalar, has_aux=True)

    return transform


def _make_tap(
    inner: nn.Module,
    batch: Batch,
    points: Points,
    at: dict[str, Tensor],
    shift: dict[str, Tensor],
    *,
    copies: bool,
    keep_graph: bool,
) -> Tap | None:
    if not isinstance(inner, (SharedBase, Ensemble)):
        return None
    tap = Tap(inner, argument_names=batch.input_names)
    if isinstance(inner, Ensemble):
        tap.shared = frozenset(points.inputs) if copies else frozenset()
        prefix = "models."
    else:
        # points of the base are reached through the copies of the features: one pullback per head, through the base only
        below = points.features or points.inputs or any(name.startswith("base") for name in points.activations)
        tap.shared = frozenset({"features"}) if below and copies else frozenset()
        prefix = "heads."
        if "features" in at:
            value = attached(at["features"], keep_graph=keep_graph)
            tap.override = {"features": value}
        if "features" in shift:
            tap.shift = shift["features"]
    tap.one_by_one = any(name.startswith(prefix) for name in points.activations)
    return tap


class _Recorder:
    """Forward hooks for the wanted activations, removed whatever happens."""

    def __init__(
        self,
        points: Points,
        at: dict[str, Tensor],
        shift: dict[str, Tensor],
        tap: Tap | None,
        keep_graph: bool,
        transformed: bool,
    ) -> None:
        self.points, self.at, self.shift, self.tap = points, at, shift, tap
        self.keep_graph, self.transformed = keep_graph, transformed
        self.handles: list[Any] = []
        self.calls: dict[str, int] = {}
        self.found: dict[tuple[str, int], Recorded] = {}
        self.normalized: dict[Any, str] = {}

    def attach(self, inner: nn.Module, modules: list[nn.Module]) -> None:
        # normalizations first: their hook must see the module's own output, before a point is made of it
        if not self.transformed:
            for name in train_mode_batch_norms(inner, modules):
                self.handles.append(inner.get_submodule(name).register_forward_hook(self._norm_hook(name)))
        for name in self.points.activations:
            self.handles.append(inner.get_submodule(name).register_forward_hook(self._hook(name)))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _norm_hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                self.normalized[output.grad_fn] = name

        return hook

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            index = self.calls.get(name, 0)
            self.calls[name] = index + 1
            wanted = self.points.calls.get(name)
            if wanted is not None and index not in wanted:
                return None
            leaves, structure = pytree.tree_flatten(output)
            position = next(
                (i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None
            )
            if position is None:
                raise CompatibilityError(
                    f"Module {name!r} returns no floating-point tensor to differentiate with respect to."
                )
            leaves[position] = self._point(name, index, leaves[position])
            if len(args) == 1 and isinstance(args[0], Tensor) and not self.transformed:
                recorded = self.found[name, index]
                recorded.source, recorded.version = args[0], args[0]._version
            return pytree.tree_unflatten(leaves, structure)

        return hook

    def _point(self, name: str, index: int, value: Tensor) -> Tensor:
        key = f"{name}#{index}" if f"{name}#{index}" in {**self.at, **self.shift} or index else name
        axis = self.points.activations[name]
        if key in self.at:
            given = self.at[key].movedim(0, axis)
            if given.shape != value.shape:
                raise GradregError(
                    f"at[{key!r}] has shape {tuple(self.at[key].shape)}; the activation, example first, has "
                    f"{tuple(value.movedim(axis, 0).shape)}."
                )
            value = given
        if key in self.shift:
            moved = self.shift[key].movedim(0, axis)
            if moved.shape != value.shape:
                raise GradregError(
                    f"A direction of {key!r} has shape {tuple(moved.shape)}; the activation {tuple(value.shape)}."
                )
            value = value + moved
        if self.transformed:
            self.found[name, index] = Recorded(value, axis)
            return value
        if key in self.at or not value.requires_grad:
            value = attached(value, keep_graph=self.keep_graph)
        self.found[name, index] = Recorded(value, axis, self.tap.head if self.tap is not None else None)
        return value.clone()  # what follows may work in place (ReLU(inplace=True)); the recorded tensor must not change

    def named(self) -> dict[str, Recorded]:
        """Return what was recorded, called `name` for a single call and `name#k` for several."""
        if not self.points.activations:
            return {}
        silent = [name for name in self.points.activations if name not in self.calls]
        if self.points.required & set(silent) or (silent and not self.calls):
            raise CompatibilityError(
                f"Module {silent[0]!r} was not called in the forward (or only inside a fused kernel), so it has no activation."
            )
        for name, wanted in self.points.calls.items():
            missing = [index for index in wanted if index >= self.calls.get(name, 0)]
            if missing:
                raise UnknownNameError(
                    f"Activations('{name}#{missing[0]}'): the module was called {self.calls[name]} times."
                )
        named = {
            name if self.calls[name] == 1 else f"{name}#{index}": recorded
            for (name, index), recorded in self.found.items()
        }
        for key in {**self.at, **self.shift}:
            if key.partition("#")[0] in self.points.activations and key not in named:
                raise UnknownNameError(f"There is no activation {key!r}; this forward has {closest(key, named)}.")
        return named


def _outputs(outputs: Any, points: Points) -> Any:
    """Make every output a tensor of its own in the graph, where the outputs are wanted."""
    if not points.outputs:
        return outputs

    def point(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.requires_grad:
            return leaf
        return leaf.detach().requires_grad_()

    return pytree.tree_map(point, outputs)
