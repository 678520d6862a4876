"""Checks by a second, small forward: are examples mixed, and does the stated axis run over them?"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradreg.batch import Batch, as_batch
from gradreg.engine._evaluate import evaluate
from gradreg.engine._observe import Capture, grad_mode, observe
from gradreg.engine._points import Points
from gradreg.engine._pull import pull
from gradreg.engine._request import head_count
from gradreg.errors import CompatibilityError, CoupledExamplesError, DisconnectedWarning, GradregError, ScalarError
from gradreg.model import devices_of, preserved, unwrap
from gradreg.scalars import AcrossHeads, ScalarFunction, across_heads, bind, check_scalar, scalar_key

# Pairs of model and scalar that were found not to mix examples
_INDEPENDENT: WeakKeyDictionary[nn.Module, deque[tuple[Any, ...]]] = WeakKeyDictionary()
# So many targets are pulled back one by one, which finds a mix beside targets that are not finite
_FEW_TARGETS = 8
_VERIFIED_AXES: WeakKeyDictionary[nn.Module, set[tuple[str, int]]] = WeakKeyDictionary()


def check_independent(
    inner: nn.Module,
    batch: Batch,
    of: ScalarFunction,
    points: Points,
    heads: int | None,
    at: Mapping[str, Tensor],
) -> None:
    """Refuse models and scalars that mix examples, by three examples: the first must not move with the others, nor the last.

    Each pair of scalar and model (without a wrapper, which would count the forward) is looked at once. A mix that lies before
    `wrt` does no harm and is not found.

    Raises:
        CoupledExamplesError: If the gradient of one example's scalar reaches another example.
        ScalarError: If `of` serves the whole batch but not three of its examples.
    """
    known = _INDEPENDENT.setdefault(inner, deque(maxlen=16))
    key = (*scalar_key(of), inner.training, *points.inputs, points.features, points.outputs, *points.activations)
    if len(batch) < 2 or key in known:
        return
    few = batch[:3]
    with grad_mode(), preserved(inner, devices_of(inner)), warnings.catch_warnings():
        warnings.simplefilter("ignore", DisconnectedWarning)
        try:
            capture = observe(inner, few, points, at={name: value[:3] for name, value in at.items()})
        except (GradregError, RuntimeError, ValueError):
            return  # a model that fixes the size of its batch cannot be looked at in part
        for example in (0, len(few) - 1):
            found = _pulled_one(inner, capture, of, points, heads, example)
            others = [position for position in range(len(few)) if position != example]
            mixed = [name for name, value in found.items() if bool(value[others].nan_to_num(0, 0, 0).count_nonzero())]
            if mixed:
                raise CoupledExamplesError(
                    f"The scalar of one example depends on {', '.join(map(repr, mixed))} of another: the model or of={of!r} "
                    "mixes examples (a mean over the batch, a normalization, a mask or recurrence over the wrong axis), "
                    "and a per-example gradient does not exist."
                )
    known.append(key)


class _Mixed:
    """Many targets as one sum with random weights, which vanishes only where all do: one pullback instead of hundreds."""

    def __init__(self, of: ScalarFunction) -> None:
        self.of, self.output = of, getattr(of, "output", None)

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        values = check_scalar(self.of(outputs, batch), len(batch), self.of)
        targets = values.numel() // len(values)
        if targets <= _FEW_TARGETS:
            return values
        weights = torch.randn(targets, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return values.flatten(1) @ weights.to(values)


def _pulled_one(
    inner: nn.Module, capture: Capture, of: ScalarFunction, points: Points, heads: int | None, example: int
) -> dict[str, Tensor]:
    mixed = across_heads(_Mixed(of)) if isinstance(of, AcrossHeads) else _Mixed(of)
    try:
        return pull(inner, capture, mixed, points, heads, differentiable=False, example=example)
    except (RuntimeError, IndexError) as problem:
        raise closes_over(of, problem) from problem


def closes_over(of: ScalarFunction, problem: Exception) -> ScalarError:
    """Return the error for a scalar that serves a whole batch but not a part of it."""
    return ScalarError(
        f"of={of!r} fails on the first examples of the batch ({str(problem).splitlines()[0]}). Does it close over data that "
        "belongs to examples? Put such data into batch.extras and read it from the batch that `of` is given."
    )


def check_batch_axes(inner: nn.Module, batch: Batch, capture: Capture, points: Points) -> None:
    """Refuse activations whose batch axis is not the stated one, by a forward of one example fewer.

    Time-major networks and relative position biases have activations whose first axis is no example. Each activation of
    a model is looked at once.

    Raises:
        CompatibilityError: If an activation does not shrink with the batch.
    """
    verified = _VERIFIED_AXES.setdefault(inner, set())
    keys = {
        key: recorded for key, recorded in capture.activations.items() if (key, recorded.batch_axis) not in verified
    }
    if not keys:
        return
    n = len(batch)
    for key, recorded in keys.items():
        shape = tuple(recorded.tensor.shape)
        if recorded.tensor.dim() <= recorded.batch_axis or shape[recorded.batch_axis] != n:
            raise CompatibilityError(_axis_text(key, recorded.batch_axis, shape, n))
    fewer = batch[: n - 1] if n > 1 else batch[[0, 0]]
    with grad_mode(), preserved(inner, devices_of(inner)):
        try:
            probe = observe(inner, fewer, points, copies=False)
        except (GradregError, RuntimeError, ValueError):
            return  # a model that fixes the size of its batch; the axis had the right length
    for key, recorded in keys.items():
        if key not in probe.activations:
            continue
        length = probe.activations[key].tensor.shape[recorded.batch_axis]
        if length != len(fewer):
            raise CompatibilityError(_axis_text(key, recorded.batch_axis, tuple(recorded.tensor.shape), n))
    verified.update((key, recorded.batch_axis) for key, recorded in keys.items())


def _axis_text(key: str, axis: int, shape: tuple[int, ...], n: int) -> str:
    return (
        f"Axis {axis} of activation {key!r} (shape {shape}) does not run over the {n} examples. Where another axis does, name "
        f'it: Activations("{key}", batch_axis=...); an activation without an axis of examples has no per-example gradient.'
    )


def has_head_axis(model: nn.Module, batch: Any, of: ScalarFunction) -> bool:
    """Whether scalars are `[n, K, ...]`: from heads, or from targets that a model without heads gives."""
    inner = unwrap(model)
    if head_count(inner) is not None and not isinstance(of, AcrossHeads):
        return True
    few = as_batch(batch)[:2]
    with grad_mode(), preserved(inner, devices_of(inner)):
        capture = observe(inner, few, Points())
        return evaluate(bind(of, inner), capture.outputs, few, head_count(inner)).dim() > 1
