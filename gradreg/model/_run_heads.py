"""Running several heads on the same inputs: one vmapped pass, one fused with gradients, or a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from gradreg.errors import GradregError, HeadsError
from gradreg.model._functional import swapped
from gradreg.model._similarity import Alignment, align, hooked
from gradreg.model._walk import all_modules

# Below this, one pass per head is cheaper than stacking parameters and running vmap (experiments/benchmarks/diverse_heads.py)
VMAP_FROM = 4

_TAP: ContextVar[Tap | None] = ContextVar("gradreg_tap", default=None)
_REFUSALS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_NOT_FUSED: WeakKeyDictionary[nn.Module, set[object]] = WeakKeyDictionary()


@dataclass
class Tap:
    """What the engine asks of the one forward of a model with heads, and what it gets back.

    Args:
        owner: The `SharedBase` or `Ensemble` whose forward is observed.
        shared: Names of the inputs of the heads that every head shall get a copy of its own of: `"features"`, or the
            inputs of an `Ensemble`.
        override: Values that stand in for shared inputs, `[n, ...]`.
        shift: What is added to the features (a tangent).
        argument_names: Names of the positional inputs, for an `Ensemble`.
        one_by_one: Run the heads in a loop, so that hooks inside a head see ordinary tensors.
        behind_first: Whether the outputs of the heads' first layers may stand for copies of the features.
        fused: From a head, as a function of the features, to a function that gives the gradient of its scalar and its
            outputs: where one scalar alone is wanted at the features, one vmapped pass then gives both.
        scalar: What tells that scalar from others.
    """

    owner: nn.Module
    shared: frozenset[str] = frozenset()
    override: Mapping[str, Tensor] = field(default_factory=dict)
    shift: Tensor | None = None
    argument_names: tuple[str, ...] = ()
    one_by_one: bool = False
    behind_first: bool = False
    fused: Callable[[Callable[[Tensor], Any]], Callable[[Tensor], tuple[Tensor, Any]]] | None = None
    scalar: object = None
    head: int | None = None
    run: HeadsRun | None = None
    sources: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class HeadsRun:
    """One pass of all heads.

    Attributes:
        outputs: What the heads return, stacked at axis 1: `[n, K, ...]`.
        copies: Per shared input the tensors that the heads read: one tensor `[K, n, ...]` or a list of K tensors.
        gradients: Gradients at the features from a fused pass, `[n, K, ...]`.
        first: Instead of copies of the features: the outputs of the heads' first layers, and the weights of these.
    """

    outputs: Any
    copies: dict[str, Tensor | list[Tensor]]
    gradients: Tensor | None = None
    first: list[tuple[Tensor, Tensor]] | None = None


@contextmanager
def tapped(tap: Tap | None) -> Iterator[None]:
    """Let the forward of `tap.owner` inside the context fill the tap."""
    token = _TAP.set(tap)
    try:
        yield
    finally:
        _TAP.reset(token)


def tap_of(owner: nn.Module) -> Tap | None:
    tap = _TAP.get()
    return tap if tap is not None and tap.owner is owner and tap.run is None else None


def run_heads(
    owner: nn.Module,
    heads: nn.ModuleList,
    shared: dict[str, Any],
    apply: Callable[[nn.Module, Mapping[str, Any]], Any],
    tap: Tap | None,
) -> Any:
    """Run every head on the shared inputs and stack what they return at axis 1."""
    run: HeadsRun | None = None
    refusal: str | None = None
    aligned = aligned_heads(owner, heads, tap)
    if isinstance(aligned, Alignment):
        try:
            run = _fused(owner, heads[0], aligned, shared, apply, tap)
            run = run or _vmapped(heads[0], aligned, shared, apply, tap)
        except GradregError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as fault:
            refusal = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
    if run is None and tap is not None and tap.behind_first and len(heads) < VMAP_FROM:
        run = _behind_first(heads, shared)
    if run is None:
        run = _looped(heads, shared, apply, tap)
        if refusal is not None:  # a genuine fault was raised again by the loop
            _REFUSALS[owner] = refusal
    if tap is not None:
        tap.run = run
        tap.sources = {name: value for name, value in shared.items() if isinstance(value, Tensor)}
    return run.outputs


def aligned_heads(owner: nn.Module, heads: nn.ModuleList, tap: Tap | None = None) -> Alignment | str:
    """Return the heads aligned for one vmapped pass, or say why they are run one by one."""
    if len(heads) < VMAP_FROM:
        return f"{len(heads)} heads are fewer than {VMAP_FROM}"
    if tap is not None and tap.one_by_one:
        return "activations inside heads are wanted"
    return _REFUSALS.get(owner) or align(heads)


def _vmapped(
    template: nn.Module,
    aligned: Alignment,
    shared: dict[str, Any],
    apply: Callable[[nn.Module, Mapping[str, Any]], Any],
    tap: Tap | None,
) -> HeadsRun:
    copies: dict[str, Tensor | list[Tensor]] = {}
    constants, mapped = {}, {}
    for name, value in shared.items():
        if not isinstance(value, Tensor):
            constants[name] = value
        elif tap is not None and name in tap.shared:
            value = shared[name] = _differentiable(value)
            copies[name] = copy = value.unsqueeze(0).expand(len(aligned.states), *value.shape)
            mapped[name] = copy.clone() if aligned.in_place else copy
        else:
            constants[name] = value.clone() if value.is_floating_point() else value

    def one(state: dict[str, Tensor], own: dict[str, Tensor]) -> Any:
        with swapped(template, state):
            return apply(template, {name: own[name] if name in own else constants[name] for name in shared})

    outputs = vmap(one, in_dims=(0, 0), out_dims=1, randomness="different")(aligned.stacked(), mapped)
    return HeadsRun(outputs, copies)


def _fused(
    owner: nn.Module,
    template: nn.Module,
    aligned: Alignment,
    shared: dict[str, Any],
    apply: Callable[[nn.Module, Mapping[str, Any]], Any],
    tap: Tap | None,
) -> HeadsRun | None:
    """Run the heads and the gradients of their scalars in one vmapped pass; None where that is not asked for or refused.

    For features that carry no gradient (a frozen base): no gradient with respect to them is then computed in the backward.
    """
    if tap is None or tap.fused is None or tap.scalar in _NOT_FUSED.get(owner, ()):
        return None
    transform, features = tap.fused, shared["features"]
    if features.requires_grad:
        return None  # as fast through copies, which serve every scalar; behind a frozen base those would be differentiated too

    def one(state: dict[str, Tensor]) -> Any:
        with swapped(template, state):
            return transform(lambda own: apply(template, {"features": own.clone() if aligned.in_place else own}))(
                features
            )

    try:
        gradients, outputs = vmap(one, out_dims=1, randomness="different")(aligned.stacked())
    except GradregError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        _NOT_FUSED.setdefault(owner, set()).add(tap.scalar)
        return None
    return HeadsRun(outputs, {}, gradients)


def _behind_first(heads: nn.ModuleList, shared: dict[str, Any]) -> HeadsRun | None:
    """Run heads that begin with a linear layer and note its output: the gradient at the features is that at it times the weight.

    None where a head is another function of its features.
    """
    if not all(_begins_linear(head) for head in heads):
        return None
    features = shared["features"] = _differentiable(shared["features"])
    first: list[tuple[Tensor, Tensor]] = []
    outputs = []
    for head in heads:
        layers = list(head.children())
        point: Tensor = layers[0](features)
        output, version = point, point._version
        for module in layers[1:]:
            output = module(output)
        if point._version != version:
            return None  # the next layer works in place
        first.append((point, cast(Tensor, layers[0].weight)))
        outputs.append(output)
    return HeadsRun(_stacked(outputs), {}, first=first)


def _begins_linear(head: nn.Module) -> bool:
    layers = list(head.children()) if type(head) is nn.Sequential and not hooked(head) else []
    if len(layers) < 2 or len(layers) < len(head._modules) or type(layers[0]) is not nn.Linear or hooked(layers[0]):
        return False  # `children` leaves out a layer that is used twice
    return not any(getattr(module, "inplace", False) for module in layers)


def _looped(
    heads: nn.ModuleList,
    shared: dict[str, Any],
    apply: Callable[[nn.Module, Mapping[str, Any]], Any],
    tap: Tap | None,
) -> HeadsRun:
    outputs: list[Any] = []
    copies: dict[str, list[Tensor]] = {name: [] for name in shared if tap is not None and name in tap.shared}

    def run(position: int, points: dict[str, Tensor], protect: bool) -> tuple[Any, bool]:
        own = dict(shared)
        for name, value in shared.items():
            if name in points:
                own[name] = points[name].clone() if protect else points[name]
            elif isinstance(value, Tensor) and value.is_floating_point():
                own[name] = value.clone()
        versions = {name: own[name]._version for name in points}
        output = apply(heads[position], own)
        return output, not protect and any(own[name]._version != version for name, version in versions.items())

    def fresh() -> dict[str, Tensor]:
        return {name: shared[name].clone() for name in copies}

    for name in copies:
        shared[name] = _differentiable(shared[name])

    for position, head in enumerate(heads):
        if tap is not None:
            tap.head = position
        points = fresh()
        in_place = any(getattr(module, "inplace", False) for module in all_modules(head))
        output, changed = run(position, points, protect=in_place)
        if changed:  # by a function, which no attribute announces: run again on copies
            points = fresh()
            output, _ = run(position, points, protect=True)
        for name, point in points.items():
            copies[name].append(point)
        outputs.append(output)
    if tap is not None:
        tap.head = None
    return HeadsRun(_stacked(outputs), dict(copies))


def _differentiable(value: Tensor) -> Tensor:
    """Return a shared input that gradients can be taken with respect to, also behind a frozen base."""
    return value if value.requires_grad else value.detach().requires_grad_()


def _stacked(outputs: Sequence[Any]) -> Any:
    leaves, structures = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    for position, structure in enumerate(structures):
        if structure != structures[0]:
            raise HeadsError(f"Head {position} returns another structure than head 0: {structure} and {structures[0]}.")
    stacked = []
    for column in zip(*leaves, strict=True):
        if not isinstance(column[0], Tensor):
            stacked.append(column[0])
            continue
        for position, value in enumerate(column):
            if value.dtype != column[0].dtype:
                raise HeadsError(
                    f"Head {position} gives {value.dtype}, head 0 {column[0].dtype}; all heads must agree."
                )
            if value.shape != column[0].shape:
                raise HeadsError(
                    f"Head {position} gives outputs of shape {tuple(value.shape)}, head 0 of {tuple(column[0].shape)}. All "
                    "heads must give the same shape."
                )
        stacked.append(torch.stack(column, 1))
    return pytree.tree_unflatten(stacked, structures[0])
