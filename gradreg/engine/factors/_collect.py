"""Collect the factors of a batch: one forward, one backward per target, and the local rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._checks import closes_over
from gradreg.engine._coupling import check_uncoupled
from gradreg.engine._evaluate import check_targets, evaluate
from gradreg.engine._observe import grad_mode, observe
from gradreg.engine._params import check_on_few
from gradreg.engine._pull import warn_disconnected
from gradreg.engine._request import Points, Request
from gradreg.engine.factors._assign import Assignment, assign
from gradreg.engine.factors._axes import CallAxes, axes_of, examples_first
from gradreg.engine.factors._closed_forms import closed_form
from gradreg.engine.factors._consumers import consumers
from gradreg.engine.factors._factors import Coverage, Factors
from gradreg.engine.factors._local import local_pieces
from gradreg.engine.factors._pieces import Dense, Outer, Piece, joined
from gradreg.engine.factors._record import Call, recorded
from gradreg.errors import CompatibilityError
from gradreg.model import devices_of, preserved, walk
from gradreg.scalars import scalar_key

# Gives the gradients of the parameters that no layer's rule can serve, `{name: [n, *targets, *shape]}`
Fallback: TypeAlias = Callable[[Request, dict[str, nn.Parameter]], dict[str, Tensor]]

_DIFFERS = "on a probe the rules of layers and autograd disagree"


@dataclass
class Layout:
    """What is known of a model under a scalar: where the examples are, and which parameters the rules serve.

    Attributes:
        axes: By call.
        expanded: Calls whose input, the same for all examples, is repeated.
        refused: From the name of a parameter to the reason why the rules do not serve it.
        looped: Calls whose module vmap refuses: pulled back one example at a time.
        everywhere: Whether all modules are recorded, not only those that hold parameters: where one is used by a module
            that does not hold it.
    """

    axes: dict[tuple[str, int], CallAxes | None] = field(default_factory=dict)
    expanded: set[tuple[str, int]] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    looped: set[tuple[str, int]] = field(default_factory=set)
    everywhere: bool = False


@dataclass
class _Pass:
    """One forward with what it recorded."""

    calls: dict[tuple[str, int], Call]
    scalars: Tensor
    used: dict[str, list[int]]


_LAYOUTS: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], Layout]] = WeakKeyDictionary()


def collect(
    request: Request, fallback: Fallback, *, each_target: bool = False, refusal: str | None = None
) -> Factors:
    """Return the factors of the parameters of a request.

    Args:
        request: Parameters per example, not differentiable, without `at`.
        fallback: For parameters that no rule serves.
        each_target: Rows are (example, target), example-major; else the targets of an example are summed.
        refusal: Why the fallback must serve all parameters, if so.
    """
    if refusal is not None:
        return _all_fallen_back(request, fallback, each_target, refusal)
    known = _LAYOUTS.setdefault(request.inner, {})
    key = _layout_key(request)
    if key not in known:
        known[key] = _lay_out(request)
    found = _pieces_of(request, known[key], each_target)
    if found is None:  # other calls than those that were looked at: data-dependent models
        known[key] = _lay_out(request)
        found = _pieces_of(request, known[key], each_target, strict=False)
        assert found is not None
    pieces, assignment, targets = found
    unserved = {name: parameter for name, parameter in request.params.items() if name in assignment.unserved}
    if unserved:
        for name, value in fallback(request, unserved).items():
            pieces[name] = [_fallen_back(value, unserved[name].shape, each_target)]
    ordered = {name: pieces[name] for name in request.params}
    rows = len(request.batch) * (targets.numel() if each_target else 1)
    return Factors(ordered, rows, _coverage(request, assignment, known[key]), tuple(targets) if each_target else ())


def _all_fallen_back(request: Request, fallback: Fallback, each_target: bool, refusal: str) -> Factors:
    assignment = Assignment(unserved=dict.fromkeys(request.params, refusal))
    found = fallback(request, request.params)
    name, parameter = next(iter(request.params.items()))
    targets = tuple(found[name].shape[1 : found[name].dim() - parameter.dim()]) if each_target else ()
    pieces = {key: [_fallen_back(found[key], own.shape, each_target)] for key, own in request.params.items()}
    return Factors(pieces, pieces[name][0].rows, _coverage(request, assignment, Layout()), targets)


def _fallen_back(value: Tensor, shape: torch.Size, each_target: bool) -> Piece:
    n = len(value)
    return Dense(value.reshape(-1, *shape) if each_target else value.reshape(n, -1, *shape).sum(1))


def _layout_key(request: Request) -> tuple[object, ...]:
    modules = tuple((id(module), module.training) for _, module in walk(request.inner))
    kinds = tuple((name, getattr(value, "dtype", None), getattr(value, "ndim", None)) for name, value in request.batch.named_inputs().items())
    return (*scalar_key(request.of), modules, kinds, tuple(request.params))


def _watched(request: Request, everywhere: bool) -> dict[str, nn.Module]:
    """Return the modules that hold a wanted parameter themselves, or all below the model, by name."""
    wanted = {id(parameter) for parameter in request.params.values()}
    return {
        name: module
        for name, module in walk(request.inner)
        if any(id(parameter) in wanted for parameter in module._parameters.values()) or (everywhere and name)
    }


def _run(request: Request, batch: Batch, layout: Layout) -> _Pass:
    """Run one forward; must be surrounded by `grad_mode` and `preserved`."""
    with recorded(_watched(request, layout.everywhere), layout.expanded, len(batch)) as calls:
        capture = observe(request.model, batch, Points(), copies=False, heads_apart=True)
    check_targets(request.of, capture.outputs, batch)
    try:
        scalars = evaluate(request.of, capture.outputs, capture.batch, request.heads)
    except (RuntimeError, IndexError) as problem:
        if len(batch) == len(request.batch):
            raise
        raise closes_over(request.of, problem) from problem
    if not scalars.requires_grad:
        raise CompatibilityError(
            f"of={request.of!r} carries no graph to the parameters {', '.join(map(repr, list(request.params)[:3]))}...: is the "
            "path cut by detach() or no_grad()?"
        )
    check_uncoupled(scalars, request.params.values(), capture.normalized, "the parameters")
    scalars = scalars.sum(1) if request.over_heads else scalars
    return _Pass(dict(calls), scalars, consumers(scalars, request.params))


def _pieces_of(
    request: Request, layout: Layout, each_target: bool, *, strict: bool = True
) -> tuple[dict[str, list[Piece]], Assignment, torch.Size] | None:
    """Return pieces by parameter, who gave them, and the number of targets; None where unknown calls took place."""
    inner = request.inner
    with grad_mode(), preserved(inner, devices_of(inner)):
        run = _run(request, request.batch, layout)
        if strict and not run.calls.keys() <= layout.axes.keys():
            return None
        assignment = assign(run.used, run.calls, layout.axes, request.params)
        for name, reason in layout.refused.items():
            _withdraw(assignment, name, reason)
        if not any(run.used.values()):
            warn_disconnected(request.of, request.params)
        pieces = _pulled(request, run, assignment, layout, each_target)
    return pieces, assignment, run.scalars.shape[1:]


def _withdraw(assignment: Assignment, name: str, reason: str) -> None:
    assignment.unserved[name] = reason
    assignment.rules.pop(name, None)
    for calls in (assignment.closed, assignment.local):
        for names in calls.values():
            for attribute in [attribute for attribute, own in names.items() if own == name]:
                del names[attribute]


def _pulled(
    request: Request, run: _Pass, assignment: Assignment, layout: Layout, each_target: bool
) -> dict[str, list[Piece]]:
    keys = [key for key in {**assignment.closed, **assignment.local} if assignment.closed.get(key) or assignment.local.get(key)]
    wanted = [(key, position) for key in keys for position in run.calls[key].edges]
    edges = [run.calls[key].edges[position] for key, position in wanted]
    n = len(run.scalars)
    flat = run.scalars.reshape(n, -1)
    columns = [flat[:, target].sum() for target in range(flat.shape[1])] if each_target else [flat.sum()]
    per_target: list[dict[str, list[Piece]]] = []
    for column in columns:
        last = column is columns[-1]
        found = torch.autograd.grad(column, edges, allow_unused=True, retain_graph=not last) if edges else ()
        gradients: dict[tuple[str, int], dict[int, Tensor]] = {key: {} for key in keys}
        for (key, position), gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                gradients[key][position] = gradient
        per_target.append(_by_rules(run.calls, gradients, assignment, layout, n))
    result: dict[str, list[Piece]] = {}
    for name, parameter in request.params.items():
        if name in assignment.unserved:
            continue
        targets = [joined(found.get(name, [])) or [_nothing(parameter, n)] for found in per_target]
        result[name] = targets[0] if len(targets) == 1 else [_interleaved(targets)]
    return result


def _by_rules(
    calls: Mapping[tuple[str, int], Call],
    gradients: Mapping[tuple[str, int], dict[int, Tensor]],
    assignment: Assignment,
    layout: Layout,
    n: int,
) -> dict[str, list[Piece]]:
    result: dict[str, list[Piece]] = {}
    for key, at in gradients.items():
        call, axes = calls[key], layout.axes[key]
        if not at or axes is None:
            continue
        places = axes.per_example or 1
        form, attributes = closed_form(call.module), assignment.closed.get(key)
        if attributes and form is not None:
            own = _by_form(form[1], call, axes, at)
            for attribute, name in attributes.items():
                result.setdefault(name, []).append(_per_example(own[attribute], n, places))
        names = assignment.local.get(key)
        if names:
            inside = dict(call.module.named_parameters())
            parameters = {relative: inside[relative] for relative in names}
            found = local_pieces(call, axes, at, parameters, layout.looped)
            for relative, name in names.items():
                result.setdefault(name, []).append(_per_example(found[relative], n, places))
    return result


@torch.no_grad()
def _by_form(form: Any, call: Call, axes: CallAxes, at: dict[int, Tensor]) -> dict[str, Piece]:
    source = next(i for i, axis in enumerate(axes.inputs) if axis is not None)
    (position,) = at
    axis, end = axes.inputs[source], axes.outputs[position]
    assert axis is not None and end is not None
    x, d = examples_first(call.inputs[source].detach(), axis), examples_first(at[position], end)
    if d.dtype in (torch.float16, torch.bfloat16):
        x, d = x.float() if x.is_floating_point() else x, d.float()
    elif x.is_floating_point() and x.dtype != d.dtype:
        x = x.to(d.dtype)
    found: dict[str, Piece] = form(call.module, x, d)
    return found


def _per_example(piece: Piece, n: int, places: int) -> Piece:
    """Add up the places of an example: rows of a flattened batch."""
    if places == 1:
        return piece
    if isinstance(piece, Dense):
        return Dense(piece.value.reshape(n, places, *piece.value.shape[1:]).sum(1))
    left, right = piece.left, piece.right
    return Outer(left.reshape(n, -1, *left.shape[2:]), right.reshape(n, -1, right.shape[2]), piece.shape)


def _nothing(parameter: Tensor, n: int) -> Piece:
    """No terms: the gradient is zero, whatever the size of the parameter."""
    p = parameter.shape[1:].numel() if parameter.dim() > 1 else 1
    q = parameter.numel() // p if p else 0
    dtype = torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype
    empty = parameter.new_zeros(n, 0, q, dtype=dtype)
    return Outer(empty, parameter.new_zeros(n, 0, p, dtype=dtype), parameter.shape)


def _interleaved(targets: list[list[Piece]]) -> Piece:
    """Put the rows of targets side by side: (example, target), example-major."""
    if all(len(pieces) == 1 and isinstance(pieces[0], Outer) for pieces in targets):
        outer = [pieces[0] for pieces in targets if isinstance(pieces[0], Outer)]
        if len({(o.left.shape, o.right.shape) for o in outer}) == 1:
            left, right = (torch.stack([getattr(o, side) for o in outer], 1).flatten(0, 1) for side in ("left", "right"))
            return Outer(left, right, outer[0].shape)
    written = [sum((piece.dense() for piece in pieces[1:]), pieces[0].dense()) for pieces in targets]
    return Dense(torch.stack(written, 1).flatten(0, 1))


def _lay_out(request: Request) -> Layout:
    """Look at three examples: where the examples are in every call, and whether the rules give what autograd gives."""
    check_on_few(request, vmapped=False)
    n = len(request.batch)
    three, two = (request.batch[[i % n for i in range(count)]] for count in (3, 2))
    layout = Layout()
    _repeat_what_is_the_same(request, three, two, layout)
    unserved = _compare(request, three, layout)
    if unserved:
        wider = Layout(expanded=set(layout.expanded), everywhere=True)
        wider.axes = _axes(request, three, two, wider)
        if _compare(request, three, wider) < unserved:
            return wider
    return layout


def _repeat_what_is_the_same(request: Request, three: Batch, two: Batch, layout: Layout) -> None:
    """Find calls whose argument is the same for all examples, and repeat it where the model does not mind."""
    inner = request.inner
    with grad_mode(), preserved(inner, devices_of(inner)):
        plain = _run(request, three, layout).scalars
    for key in _same_for_all(request, three, two, layout):
        trial = Layout(expanded={*layout.expanded, key})
        with grad_mode(), preserved(inner, devices_of(inner)):
            try:
                repeated = _run(request, three, trial).scalars
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue  # the model wants this tensor as it is
        if repeated.shape == plain.shape and _close(repeated, plain):
            layout.expanded.add(key)
    layout.axes = _axes(request, three, two, layout)


def _axes(request: Request, three: Batch, two: Batch, layout: Layout) -> dict[tuple[str, int], CallAxes | None]:
    inner = request.inner
    runs = []
    for rows in (three, two):
        with grad_mode(), preserved(inner, devices_of(inner)):
            runs.append(_run(request, rows, layout).calls)
    first, second = runs
    return {key: axes_of(call, second[key]) if key in second else None for key, call in first.items()}


def _same_for_all(request: Request, three: Batch, two: Batch, layout: Layout) -> list[tuple[str, int]]:
    """Return the calls of layers with closed forms whose argument is the same for all examples (positions)."""
    inner = request.inner
    axes = _axes(request, three, two, layout)
    modules = dict(walk(inner))
    return [
        key
        for key, found in axes.items()
        if found is not None and closed_form(modules[key[0]]) is not None and not any((*found.inputs, *found.outputs))
    ]


def _compare(request: Request, three: Batch, layout: Layout) -> int:
    """Compare the rules with autograd on the three examples, and return how many parameters they do not serve."""
    inner = request.inner
    with grad_mode(), preserved(inner, devices_of(inner)):
        run = _run(request, three, layout)
        assignment = assign(run.used, run.calls, layout.axes, request.params)
        names = [name for name in request.params if name not in assignment.unserved]
        wanted = [request.params[name] for name in names]
        truth: list[tuple[Tensor, ...]] = []
        if wanted:
            for scalar in run.scalars.reshape(3, -1).sum(1):
                truth.append(torch.autograd.grad(scalar, wanted, retain_graph=True, allow_unused=True, materialize_grads=True))
        pieces = _pulled(request, run, assignment, layout, each_target=False)
    scale = max((float(g.abs().max()) for row in truth for g in row if g.numel()), default=0.0)
    for i, name in enumerate(names):
        expected = torch.stack([row[i] for row in truth])
        found = sum((piece.dense() for piece in pieces[name][1:]), pieces[name][0].dense())
        if not _close(found, expected, scale):
            layout.refused[name] = _DIFFERS
    return len(assignment.unserved) + len(layout.refused)


def _close(found: Tensor, expected: Tensor, scale: float = 0.0) -> bool:
    found, expected = found.detach(), expected.detach()
    eps = torch.finfo(expected.dtype).eps
    if not expected.numel():
        return True
    largest = float(expected.abs().max())
    return float((found.to(expected) - expected).abs().max()) <= eps**0.6 * largest + 100 * eps * scale


def _coverage(request: Request, assignment: Assignment, layout: Layout) -> tuple[Coverage, ...]:
    rows = []
    for name, parameter in request.inner.named_parameters():
        if name in assignment.unserved:
            rows.append(Coverage(name, parameter.numel(), "gradients", assignment.unserved[name]))
        elif name in assignment.rules:
            slow = [key for key, names in assignment.local.items() if name in names.values() and key in layout.looped]
            reason = "one example at a time: vmap refuses the module" if slow else ""
            rows.append(Coverage(name, parameter.numel(), " + ".join(assignment.rules[name]), reason))
        else:
            reason = "not among wrt" if parameter.requires_grad else "frozen (requires_grad=False)"
            rows.append(Coverage(name, parameter.numel(), None, reason))
    return tuple(rows)
