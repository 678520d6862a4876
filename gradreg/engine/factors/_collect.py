"""Collect the factors of a batch: one forward, one backward per target, and the local rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradreg.engine._observe import grad_mode
from gradreg.engine._pull import warn_disconnected
from gradreg.engine._request import Request
from gradreg.engine.factors._assign import Assignment, assign
from gradreg.engine.factors._factors import Coverage, Factors
from gradreg.engine.factors._forward import Layout, Pass, run_forward
from gradreg.engine.factors._layout import DIFFERS, lay_out
from gradreg.engine.factors._pieces import Piece, dense
from gradreg.engine.factors._rules import pieces_by_parameter
from gradreg.engine.factors._verify import disagreeing, row_weights, weighted_truth
from gradreg.model import devices_of, preserved, walk
from gradreg.scalars import scalar_key

# Gives the gradients of the parameters that no layer's rule can serve, `{name: [n, *targets, *shape]}`
Fallback: TypeAlias = Callable[[Request, dict[str, nn.Parameter]], dict[str, Tensor]]

# What was found out about a model, per scalar, mode and kind of input
_LAYOUTS: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], Layout]] = WeakKeyDictionary()


def collect(request: Request, fallback: Fallback, *, each_target: bool = False, refusal: str | None = None) -> Factors:
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
    of_these_shapes = (*key, _shapes_key(request))
    if of_these_shapes in known:
        key = of_these_shapes
    if key not in known:
        known[key] = lay_out(request)
    found = _pieces_of(request, known[key], each_target)
    if found is None:  # other calls than those that were looked at, or examples elsewhere: shapes or data decide
        key = of_these_shapes
        known[key] = lay_out(request)
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
    return dense(value.reshape(-1, *shape) if each_target else value.reshape(n, -1, *shape).sum(1))


def _pieces_of(
    request: Request, layout: Layout, each_target: bool, *, strict: bool = True
) -> tuple[dict[str, list[Piece]], Assignment, torch.Size] | None:
    """Return pieces by parameter, who gave them, and the number of targets; None where unknown calls took place."""
    inner, n = request.inner, len(request.batch)
    with grad_mode(), preserved(inner, devices_of(inner)):
        run = run_forward(request, request.batch, layout)
        known = {key: axes for key, axes in layout.axes.items() if key in run.calls}
        axes = {key: found if found is None or found.fit(run.calls[key], n) else None for key, found in known.items()}
        if strict and not (run.calls.keys() <= axes.keys() and axes == known):
            return None
        assignment = assign(run.used, run.calls, axes, request.params)
        for name, reason in layout.refused.items():
            _withdraw(assignment, name, reason)
        if not any(run.used.values()):
            warn_disconnected(request.of, request.params)
        doubted = _doubted(request, run, assignment, layout)
        scalars = run.scalars.reshape(n, -1) if each_target else run.scalars.reshape(n, -1).sum(1)
        weights = row_weights(scalars)
        truth = weighted_truth(scalars, weights, doubted) if doubted else {}
        pieces = pieces_by_parameter(request, run, assignment, layout, each_target)
        for name in disagreeing(pieces, weights, truth):
            layout.refused[name] = DIFFERS
            _withdraw(assignment, name, DIFFERS)
        layout.unseen -= {name for name, value in truth.items() if value.any()}
    return pieces, assignment, run.scalars.shape[1:]


def _doubted(request: Request, run: Pass, assignment: Assignment, layout: Layout) -> dict[str, nn.Parameter]:
    """Return the parameters whose rules are compared with autograd on the batch itself.

    All of them where the data decide where examples are, or where a module runs a second time, with other random numbers
    perhaps; else those that earlier batches told nothing about.
    """
    every = run.moving or any(assignment.local.values())
    return {
        name: parameter
        for name, parameter in request.params.items()
        if name not in assignment.unserved and run.used[name] and (every or name in layout.unseen)
    }


def _withdraw(assignment: Assignment, name: str, reason: str) -> None:
    assignment.unserved[name] = reason
    assignment.rules.pop(name, None)
    for calls in (assignment.closed, assignment.local):
        for names in calls.values():
            for attribute in [attribute for attribute, own in names.items() if own == name]:
                del names[attribute]


def _layout_key(request: Request) -> tuple[object, ...]:
    modules = tuple((id(module), module.training) for _, module in walk(request.inner))
    inputs = request.batch.named_inputs().items()
    kinds = tuple((name, getattr(value, "dtype", None), getattr(value, "ndim", None)) for name, value in inputs)
    # of one or two examples less can be learned than of three
    return (*scalar_key(request.of), modules, kinds, tuple(request.params), min(len(request.batch), 3))


def _shapes_key(request: Request) -> tuple[object, ...]:
    inputs = request.batch.named_inputs().values()
    return tuple(tuple(value.shape[1:]) if isinstance(value, Tensor) else None for value in inputs)


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
