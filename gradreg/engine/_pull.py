"""Pullbacks from one recorded forward to inputs, features, activations and outputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradreg.batch import substituted
from gradreg.engine._coupling import check_uncoupled
from gradreg.engine._evaluate import evaluate_checked
from gradreg.engine._observe import Capture
from gradreg.engine._points import Points
from gradreg.engine._scale import scaled, unscaled
from gradreg.errors import DisconnectedWarning, warn
from gradreg.model import Ensemble
from gradreg.scalars import AcrossHeads, ScalarFunction, read_outputs


@dataclass
class _Target:
    """Where one requested key is found: behind the copies that heads read, beside a head, or below the copies.

    `through` holds the weights of linear layers, where the tensors are the layers' outputs in place of what they read.
    """

    key: str
    tensors: list[Tensor]
    stacked: bool = False
    head: int | None = None
    batch_axis: int = 0
    below: bool = False
    through: list[Tensor] | None = None


def pull(
    model: nn.Module,
    capture: Capture,
    of: ScalarFunction,
    points: Points,
    heads: int | None,
    *,
    differentiable: bool,
    example: int | None = None,
) -> dict[str, Tensor]:
    """Pull one scalar back to recorded points: one pullback per target, for all heads together.

    Points below the shared features (inputs, activations of the base) are then reached by one pullback per head, through
    the base alone.

    Args:
        model: The model without wrappers.
        capture: The recorded forward.
        of: The scalar.
        points: The points that are wanted, a subset of what was recorded.
        heads: The number of heads, or None.
        differentiable: Whether results carry a graph.
        example: Pull back the scalars of this example alone.

    Returns:
        From key to `[n, *targets, *shape]`, with heads `[n, K, *targets, *shape]`.
    """
    return pull_with_values(model, capture, of, points, heads, differentiable=differentiable, example=example)[1]


def pull_with_values(
    model: nn.Module,
    capture: Capture,
    of: ScalarFunction,
    points: Points,
    heads: int | None,
    *,
    differentiable: bool,
    example: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the scalars beside what `pull` returns."""
    per_head = heads if not isinstance(of, AcrossHeads) else None
    own = _Direct(capture, points, per_head)
    scalar = evaluate_checked(of, capture.outputs, own.batch, heads)
    targets = _targets(model, capture, of, points, per_head)
    keys = [target.key for target in targets]
    _check_coupling(scalar, targets, capture)
    leading = 1 if per_head is None else 2
    target_shape = scalar.shape[leading:]
    if scalar.requires_grad:
        rows = scalar if example is None else scalar[example : example + 1]
        alone = not target_shape or own.aliases
        together = None if alone else _pull_together(rows.flatten(leading), targets, per_head, differentiable)
        if together is not None:
            found = dict(zip(keys, together, strict=True))
            return scalar, {key: unscaled(value.unflatten(leading, target_shape)) for key, value in found.items()}
        each = rows.flatten(leading).unbind(leading) if target_shape else (rows,)
        columns = [
            own.added(one, targets, _pull_one(one.sum(), targets, capture, per_head, differentiable), differentiable)
            for one in map(scaled, each)
        ]
    else:
        nothing: list[Tensor | None] = [None] * len(targets)
        columns = [nothing] * max(target_shape.numel(), 1)
    if all(value is None for column in columns for value in column):
        warn_disconnected(of, keys)
    results = {}
    for target, column in zip(targets, zip(*columns, strict=True), strict=True):
        values = [_zeros(target, per_head) if value is None else value for value in column]
        # one target after the other in memory: plain copies, not strided, here and in the backward
        value = torch.stack(values).unflatten(0, target_shape) if target_shape else values[0]
        axes = len(target_shape)
        if axes:
            value = value.movedim(tuple(range(axes)), tuple(range(leading, leading + axes)))
        results[target.key] = unscaled(value)
    return scalar, results


class _Direct:
    """The direct way from inputs to a scalar that reads `batch.inputs` itself, as a reconstruction loss does.

    Inputs of models with heads are reached through the heads' copies, which this way passes by. The scalar is given aliases
    of the inputs; where it used one, the heads' direct gradients are added one by one.
    """

    def __init__(self, capture: Capture, points: Points, per_head: int | None) -> None:
        self.heads = per_head or 0
        named = capture.batch.named_inputs()
        self.aliases = {name: named[name].view_as(named[name]) for name in points.inputs} if per_head else {}
        self.batch = substituted(capture.batch, self.aliases) if self.aliases else capture.batch

    def added(
        self, scalars: Tensor, targets: list[_Target], gradients: list[Tensor | None], differentiable: bool
    ) -> list[Tensor | None]:
        """Return the gradients with the direct ones added; `scalars` are `[n, K]`."""
        if not self.aliases:
            return gradients
        aliases = list(self.aliases.values())
        used = _grad(scalars.sum(), aliases, None, False)
        if all(gradient is None for gradient in used):
            return gradients
        rows = [_grad(scalars[:, k].sum(), aliases, None, differentiable) for k in range(self.heads)]
        for position, name in enumerate(self.aliases):
            column = [row[position] for row in rows]
            if all(gradient is None for gradient in column):
                continue
            filled = [torch.zeros_like(aliases[position]) if value is None else value for value in column]
            place = next(i for i, target in enumerate(targets) if target.key == name)
            direct, known = torch.stack(filled, 1), gradients[place]
            gradients[place] = direct if known is None else known + direct
        return gradients


def warn_disconnected(of: ScalarFunction, keys: Iterable[str]) -> None:
    """Warn that a scalar does not depend on anything that it is differentiated with respect to."""
    warn(
        f"of={of!r} does not depend on {', '.join(map(repr, keys))}: the gradient is zero. Is the path cut by detach() or "
        "no_grad(), or is another module on the path?",
        DisconnectedWarning,
    )


def _targets(
    model: nn.Module, capture: Capture, of: ScalarFunction, points: Points, per_head: int | None
) -> list[_Target]:
    targets = []
    shared = isinstance(model, Ensemble)
    for name in points.inputs:
        if shared and per_head is not None:
            targets.append(_shared(name, capture))
        else:
            targets.append(_Target(name, [capture.inputs[name]], below=per_head is not None))
    if points.features:
        if per_head is not None and capture.first is not None:
            outputs, weights = zip(*capture.first, strict=True)
            targets.append(_Target("features", list(outputs), through=list(weights)))
        elif per_head is not None:
            targets.append(_shared("features", capture))
        else:
            targets.append(_Target("features", [capture.sources["features"]]))
    for key, recorded in capture.activations.items():
        name = key.partition("#")[0]
        wanted = points.calls.get(name)
        if name not in points.activations or (wanted is not None and int(key.partition("#")[2] or 0) not in wanted):
            continue
        below = per_head is not None and recorded.head is None
        targets.append(_Target(key, [recorded.tensor], head=recorded.head, batch_axis=recorded.batch_axis, below=below))
    if points.outputs:
        tensor = read_outputs(capture.outputs, getattr(of, "output", None))
        targets.append(_Target("outputs", [tensor]))
    return targets


def _shared(name: str, capture: Capture) -> _Target:
    copies = capture.copies[name]
    return _Target(name, [copies], stacked=True) if isinstance(copies, Tensor) else _Target(name, copies)


def _pull_one(
    scalar: Tensor, targets: list[_Target], capture: Capture, per_head: int | None, differentiable: bool
) -> list[Tensor | None]:
    """Return the gradient of one summed scalar for every target, example first and heads second; None if unconnected."""
    below = [target for target in targets if target.below]
    direct = [target for target in targets if not target.below]
    bridge = _tensors(capture.copies["features"]) if below else []
    gradients = _grad(scalar, [tensor for target in direct for tensor in target.tensors] + bridge, None, differentiable)
    found: dict[int, Tensor | None] = {}
    for target in direct:
        own, gradients = gradients[: len(target.tensors)], gradients[len(target.tensors) :]
        found[id(target)] = _filled(target, own, per_head)
    if below and any(gradient is not None for gradient in gradients):
        points = [target.tensors[0] for target in below]
        rows = [
            [None] * len(points)
            if cotangent is None
            else _grad(capture.sources["features"], points, cotangent, differentiable)
            for cotangent in _cotangents(capture.copies["features"], gradients)
        ]
        for target, column in zip(below, zip(*rows, strict=True), strict=True):
            if any(value is not None for value in column):
                filled = [torch.zeros_like(target.tensors[0]) if value is None else value for value in column]
                found[id(target)] = torch.stack([value.movedim(target.batch_axis, 0) for value in filled], 1)
    return [found.get(id(target)) for target in targets]


# The size of a result up to which its targets are pulled back together
_TOGETHER_BYTES = 2 * 2**20
_TOGETHER: ContextVar[bool] = ContextVar("gradreg_targets_together", default=False)


@contextmanager
def targets_together() -> Iterator[None]:
    """Pull several targets back in one vmapped pass inside, where the model allows it and the result is small.

    The same numbers, in fewer and larger operations: faster where layers are small (1.7 times with 10 targets, 32 examples and
    layers of 64), a tenth slower where what is pulled back leaves the processor's cache; targets then go one by one.

    Yields:
        Nothing.
    """
    token = _TOGETHER.set(True)
    try:
        yield
    finally:
        _TOGETHER.reset(token)


def _pull_together(
    scalars: Tensor, targets: list[_Target], per_head: int | None, differentiable: bool
) -> list[Tensor] | None:
    """Return `[n, (K,) T, *shape]` per target from one vmapped pullback, or None where it does not apply."""
    count = scalars.shape[-1]
    tensors = [tensor for target in targets for tensor in target.tensors]
    connected = [tensor for tensor in tensors if tensor.requires_grad]
    if not _TOGETHER.get() or count < 2 or not connected or any(target.below for target in targets):
        return None
    if count * sum(tensor.numel() * tensor.element_size() for tensor in connected) > _TOGETHER_BYTES:
        return None
    basis = torch.eye(count, dtype=scalars.dtype, device=scalars.device)
    basis = scaled(basis).reshape(count, *[1] * (scalars.dim() - 1), count).expand(count, *scalars.shape)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            found = torch.autograd.grad(
                scalars,
                connected,
                basis,
                retain_graph=True,
                create_graph=differentiable,
                allow_unused=True,
                is_grads_batched=True,
            )
    except (RuntimeError, NotImplementedError):
        return None  # an operation without a batching rule; a genuine fault is raised again one by one
    if any(gradient is None for gradient in found) or len(connected) < len(tensors):
        return None  # of what is not used there is a zero to make and perhaps a warning to give
    rows = iter(found)
    # example (and head) first, as views: nothing is unbound, stacked or copied
    return [_arranged(target, [next(rows) for _ in target.tensors], per_head, batched=1) for target in targets]


def _tensors(copies: Tensor | list[Tensor]) -> list[Tensor]:
    return [copies] if isinstance(copies, Tensor) else copies


def _cotangents(copies: Tensor | list[Tensor], gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Return the gradient of each head's scalar at the features, from that at stacked or listed copies."""
    if isinstance(copies, Tensor):
        (stacked,) = gradients
        return [] if stacked is None else list(stacked.unbind(0))
    return gradients


def _filled(target: _Target, gradients: list[Tensor | None], per_head: int | None) -> Tensor | None:
    if all(gradient is None for gradient in gradients):
        return None
    pairs = zip(gradients, target.tensors, strict=True)
    filled = [torch.zeros_like(tensor) if gradient is None else gradient for gradient, tensor in pairs]
    return _arranged(target, filled, per_head)


def _arranged(target: _Target, gradients: list[Tensor], per_head: int | None, batched: int = 0) -> Tensor:
    """Return `[n, (K,) *shape]`; with `batched=1`, where the target comes first, `[n, (K,) T, *shape]`."""
    if target.through is not None:
        pairs = zip(gradients, target.through, strict=True)
        gradients = [gradient @ weight.to(gradient.dtype) for gradient, weight in pairs]
    if target.stacked:
        return gradients[0].transpose(0, 1 + batched)
    if target.key == "outputs" and per_head is not None:
        return gradients[0].movedim(0, 2) if batched else gradients[0]
    if per_head is None or target.head is not None:
        axis = target.batch_axis + batched
        own = gradients[0].movedim(axis, 0) if axis else gradients[0]
        if per_head is None:
            return own
        # an activation inside one head: the other heads do not depend on it
        return torch.stack([own if k == target.head else torch.zeros_like(own) for k in range(per_head)], 1)
    # in memory head first, as stacked copies are: plain copies, not strided
    return torch.stack(gradients).movedim(1 + batched, 0)


def _zeros(target: _Target, per_head: int | None) -> Tensor:
    tensor = target.tensors[0]
    if target.through is not None:
        tensor = tensor.detach() @ target.through[0].detach()
    if target.stacked:
        return torch.zeros_like(tensor).transpose(0, 1)
    own = torch.zeros_like(tensor).movedim(target.batch_axis, 0)
    if target.key == "outputs" or per_head is None:
        return own
    return torch.stack([own] * per_head, 1)


def _grad(scalar: Tensor, tensors: list[Tensor], cotangent: Tensor | None, differentiable: bool) -> list[Tensor | None]:
    connected = [tensor for tensor in tensors if tensor.requires_grad]
    if not connected or not scalar.requires_grad:
        return [None] * len(tensors)
    gradients = iter(
        torch.autograd.grad(
            scalar, connected, cotangent, retain_graph=True, create_graph=differentiable, allow_unused=True
        )
    )
    return [next(gradients) if tensor.requires_grad else None for tensor in tensors]


def _check_coupling(scalar: Tensor, targets: list[_Target], capture: Capture) -> None:
    if capture.normalized:
        tensors = [tensor for target in targets for tensor in target.tensors if target.key != "outputs"]
        check_uncoupled(scalar, tensors, capture.normalized, ", ".join(repr(target.key) for target in targets))
