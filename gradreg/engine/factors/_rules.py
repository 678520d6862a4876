"""From recorded calls and the gradients at their results to pieces of parameter gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradreg.engine._request import Request
from gradreg.engine.factors._assign import Assignment
from gradreg.engine.factors._axes import CallAxes, examples_first
from gradreg.engine.factors._closed_forms import closed_form
from gradreg.engine.factors._forward import Layout, Pass
from gradreg.engine.factors._local import local_pieces
from gradreg.engine.factors._pieces import Dense, Outer, Piece, joined
from gradreg.engine.factors._record import Call


def pieces_by_parameter(
    request: Request, run: Pass, assignment: Assignment, layout: Layout, each_target: bool
) -> dict[str, list[Piece]]:
    keys = [
        key
        for key in {**assignment.closed, **assignment.local}
        if assignment.closed.get(key) or assignment.local.get(key)
    ]
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
    assert axis is not None
    assert end is not None
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
            left, right = (
                torch.stack([getattr(o, side) for o in outer], 1).flatten(0, 1) for side in ("left", "right")
            )
            return Outer(left, right, outer[0].shape)
    written = [sum((piece.dense() for piece in pieces[1:]), pieces[0].dense()) for pieces in targets]
    return Dense(torch.stack(written, 1).flatten(0, 1))
