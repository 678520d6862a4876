"""One forward that records wanted points, replaces them, or shifts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.utils import _pytree as pytree

from gradreg.batch import Batch, substituted
from gradreg.engine._maps import reached
from gradreg.engine._points import Points
from gradreg.engine._recorder import Recorded, Recorder, attached
from gradreg.engine._scale import is_scaled
from gradreg.model import (
    Ensemble,
    SharedBase,
    Tap,
    all_modules,
    call,
    differentiable_kernels,
    tapped,
    unwrap,
)
from gradreg.scalars import AcrossHeads, ScalarFunction, check_scalar, scalar_key


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
        first: The outputs of the heads' first linear layers and their weights, where these stand for copies of the features.
    """

    outputs: Any
    batch: Batch
    inputs: dict[str, Tensor] = field(default_factory=dict)
    activations: dict[str, Recorded] = field(default_factory=dict)
    copies: dict[str, Tensor | list[Tensor]] = field(default_factory=dict)
    sources: dict[str, Tensor] = field(default_factory=dict)
    normalized: dict[Any, str] = field(default_factory=dict)
    fused: tuple[ScalarFunction, Tensor] | None = None
    first: list[tuple[Tensor, Tensor]] | None = None


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
    tap = _make_tap(
        inner,
        batch,
        points,
        at,
        shift,
        copies=copies and not transformed,
        keep_graph=differentiable,
        transformed=transformed,
    )
    if tap is not None and heads_apart:
        tap.one_by_one = True
    only = isinstance(inner, SharedBase) and not isinstance(fuse, AcrossHeads) and points == Points(features=True)
    if tap is not None and only and differentiable and copies and not (transformed or at or shift):
        tap.behind_first = not tap.one_by_one
    if tap is not None and fuse is not None and differentiable and not at and only and not is_scaled():
        tap.fused, tap.scalar = _fusion(fuse, capture.batch), scalar_key(fuse)
    recorder = Recorder(points, at, shift, tap, differentiable, transformed, len(batch))
    twice = differentiable or transformed
    try:
        recorder.attach(inner, modules)
        with (
            tapped(tap),
            differentiable_kernels(inner, twice=twice, written_out=differentiable, modules=modules),
            nullcontext() if points.attentions is None else reached(inner, points.attentions, recorder.see_map),
        ):
            outputs = call(model, capture.batch)
    finally:
        recorder.remove()
    capture.activations = recorder.named()
    capture.normalized = recorder.normalized
    capture.outputs = _outputs(outputs, points)
    if tap is not None and tap.run is not None:
        capture.copies, capture.sources, capture.first = tap.run.copies, tap.sources, tap.run.first
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
    transformed: bool,
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
            value = at["features"]
            tap.override = {"features": value if transformed else attached(value, keep_graph=keep_graph)}
        if "features" in shift:
            tap.shift = shift["features"]
    tap.one_by_one = any(name.startswith(prefix) for name in points.activations)
    return tap


def _outputs(outputs: Any, points: Points) -> Any:
    """Make every output a tensor of its own in the graph, where the outputs are wanted."""
    if not points.outputs:
        return outputs

    def point(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.requires_grad:
            return leaf
        return leaf.detach().requires_grad_()

    return pytree.tree_map(point, outputs)
