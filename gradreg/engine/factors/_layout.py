"""A look at three examples before a model is taken apart: where examples are, and whether the rules are right."""

from __future__ import annotations

import torch
from torch import Tensor

from gradreg.batch import Batch
from gradreg.engine._observe import grad_mode
from gradreg.engine._params import check_on_few
from gradreg.engine._request import Request
from gradreg.engine.factors._assign import assign
from gradreg.engine.factors._axes import CallAxes, axes_of
from gradreg.engine.factors._closed_forms import closed_form
from gradreg.engine.factors._forward import Layout, run_forward
from gradreg.engine.factors._rules import pieces_by_parameter
from gradreg.engine.factors._verify import close
from gradreg.model import devices_of, preserved, walk

# A float64 model may go through float32 inside: gradients then agree to its rounding at most
_UPCAST = 1e-9

DIFFERS = "on a probe the rules of layers and autograd disagree"


def lay_out(request: Request) -> Layout:
    """Look at three examples: where the examples are in every call, and whether the rules give what autograd gives."""
    check_on_few(request, vmapped=False)
    n = len(request.batch)
    three, two = (request.batch[[i % n for i in range(count)]] for count in (3, 2))
    layout = Layout()
    _repeat_what_is_the_same(request, three, two, layout)
    unserved = _compare(request, three, layout)
    if unserved:
        wider = Layout(expanded=dict(layout.expanded), everywhere=True)
        wider.axes = _axes(request, three, two, wider)
        if _compare(request, three, wider) < unserved:
            return wider
    return layout


def _repeat_what_is_the_same(request: Request, three: Batch, two: Batch, layout: Layout) -> None:
    """Find calls whose argument is the same for all examples, and repeat it where the model does not mind."""
    inner = request.inner
    with grad_mode(), preserved(inner, devices_of(inner)):
        plain = run_forward(request, three, layout)
    for key in _same_for_all(request, three, two, layout):
        tensors = [leaf for leaf in plain.calls[key].inputs if isinstance(leaf, Tensor)]
        leading = all(tensor.dim() > 0 and len(tensor) == 1 for tensor in tensors)
        for along_leading in (True, False) if leading else (False,):
            trial = Layout(expanded={**layout.expanded, key: along_leading})
            with grad_mode(), preserved(inner, devices_of(inner)):
                try:
                    repeated = run_forward(request, three, trial).scalars
                except (RuntimeError, ValueError, IndexError, TypeError):
                    continue  # the model wants this tensor as it is
            if repeated.shape == plain.scalars.shape and close(repeated, plain.scalars):
                layout.expanded = trial.expanded
                break
    layout.axes = _axes(request, three, two, layout)


def _axes(request: Request, three: Batch, two: Batch, layout: Layout) -> dict[tuple[str, int], CallAxes | None]:
    inner = request.inner
    runs = []
    for rows in (three, two):
        with grad_mode(), preserved(inner, devices_of(inner)):
            runs.append(run_forward(request, rows, layout).calls)
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
        run = run_forward(request, three, layout)
        assignment = assign(run.used, run.calls, layout.axes, request.params)
        names = [name for name in request.params if name not in assignment.unserved]
        wanted = [request.params[name] for name in names]
        truth: list[tuple[Tensor, ...]] = []
        if wanted:
            for scalar in run.scalars.reshape(3, -1).sum(1):
                row = torch.autograd.grad(scalar, wanted, retain_graph=True, allow_unused=True, materialize_grads=True)
                truth.append(tuple(g.to_dense() if g.is_sparse else g for g in row))
        pieces = pieces_by_parameter(request, run, assignment, layout, each_target=False)
    scale = max((float(g.abs().max()) for row in truth for g in row if g.numel()), default=0.0)
    for i, name in enumerate(names):
        expected = torch.stack([row[i] for row in truth])
        found = sum((piece.dense() for piece in pieces[name][1:]), pieces[name][0].dense())
        if not close(found, expected, scale, _UPCAST):
            layout.refused[name] = DIFFERS
        elif run.used[name] and not expected.any():
            layout.unseen.add(name)
    return len(assignment.unserved) + len(layout.refused)
