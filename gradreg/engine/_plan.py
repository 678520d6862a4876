"""The last door of the engine: what a call would do, and what it would cost."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.engine._evaluate import evaluate
from gradreg.engine._gradients import run
from gradreg.engine._observe import grad_mode, observe
from gradreg.engine._params import examples_are_apart
from gradreg.engine._points import Points
from gradreg.engine._request import Request, resolve
from gradreg.engine._routes import Decision, decide, forward_refusal
from gradreg.engine._vmapped import default_chunk
from gradreg.errors import GradregWarning
from gradreg.model import Ensemble, SharedBase, aligned_heads, checkpoints_activations, devices_of, preserved
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Wrt

# Shares of one plain forward+backward: the forward, and a pullback to activations alone (no weight gradients)
_FORWARD = 1 / 3
_PULLBACK = 1 / 3
_BACKWARD = 2 / 3


@dataclass(frozen=True)
class Plan:
    """What `gradients` would do with the same arguments.

    Attributes:
        route: The route taken, `"capture"`, `"vmap"`, `"batch"` or `"loop"`; two joined by ` + ` where points and
            parameters are asked for together.
        cost: Predicted cost in units of one plain forward+backward of the model on this batch.
        result_bytes: Size of the result.
        shapes: From key to the shape of the result.
        rejected: From route to why it is not taken.
        notes: What else there is to know: how heads are run, chunks.

    Example:
        >>> import torch, gradreg as gr
        >>> plan = gr.plan(torch.nn.Linear(3, 2), torch.zeros(4, 3), gr.all_logits(), gr.Inputs())
        >>> plan.route, plan.shapes["inputs"], plan.result_bytes
        ('capture', (4, 2, 3), 96)
    """

    route: str
    cost: float
    result_bytes: int
    shapes: dict[str, tuple[int, ...]]
    rejected: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"route   {self.route}",
            f"cost    {self.cost:.2f} forward+backward",
            f"result  {self.result_bytes / 2**20:.2f} MiB in {len(self.shapes)} tensors",
        ]
        lines += [f"not     {route}: {reason}" for route, reason in self.rejected.items()]
        lines += [f"note    {note}" for note in self.notes]
        return "\n".join(lines)


def plan(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    *,
    per: str = "example",
    mean: bool = False,
    at: Mapping[str, Tensor] | None = None,
    differentiable: bool = False,
    randomness: str = "different",
    chunk_size: int | None = None,
    route: str = "auto",
) -> Plan:
    """Say which route `gradients` would take, its cost and the size of its result, and why not the others.

    Runs the call on two examples, to learn shapes and what is refused; nothing is changed.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: As in `gradients`.
        wrt: As in `gradients`.
        per: As in `gradients`.
        mean: As in `gradients`.
        at: As in `gradients`.
        differentiable: As in `gradients`.
        randomness: As in `gradients`.
        chunk_size: As in `gradients`.
        route: As in `gradients`.

    Returns:
        The plan.

    Raises:
        GradregError: As `gradients`, before any work.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Linear(3, 2)
        >>> print(gr.plan(net, torch.zeros(4, 3), gr.logit(0), gr.Params("*"), per="batch"))
        route   batch
        cost    1.00 forward+backward
        result  0.00 MiB in 2 tensors
        not     capture: capture serves inputs, features, activations and outputs
        not     vmap: per='batch' costs one backward per sum instead of one per example
        not     loop: per='batch' costs one backward per sum instead of one per example
    """
    request = resolve(
        model,
        batch,
        of,
        wrt,
        per=per,
        mean=mean,
        at=at,
        differentiable=differentiable,
        randomness=randomness,
        chunk_size=chunk_size,
        route=route,
    )
    decide(request)
    few = _on_two(request)
    decision = decide(request)  # now that vmap was tried
    shapes, total = {}, 0
    for key, value in few.items():
        shapes[key] = (
            (*_leading(request), *value.shape[1:]) if request.per == "example" else (*_leading(request), *value.shape)
        )
        total += torch.Size(shapes[key]).numel() * value.dtype.itemsize
    count = max(1, _targets(request, few).numel())
    return Plan(
        decision.route,
        _cost(request, decision, count),
        total,
        shapes,
        decision.rejected,
        tuple(_notes(request, decision)),
    )


def _on_two(request: Request) -> dict[str, Tensor]:
    """Run the call on two examples, for its shapes and for what it refuses."""
    inside = {name for name in request.at if name not in request.params}
    small = replace(
        request,
        batch=request.batch[:2],
        at={name: value[:2] if name in inside else value for name, value in request.at.items()},
        per="example" if request.per == "example" else "batch",
        mean=False,
        differentiable=False,
        chunk_size=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradregWarning)
        # layer factors carry no graph: what serves a differentiable call must be tried on a small one too
        return run(small, decide(small, factors=not request.differentiable))


def _targets(request: Request, few: dict[str, Tensor]) -> torch.Size:
    """Return the axes of targets of the result."""
    inner, batch = request.inner, request.batch[:2]
    if request.params:
        name = next(iter(request.params))
        shape = few[name].shape[1 if request.per == "example" else 0 :]
        return shape[: len(shape) - request.params[name].dim()]
    with grad_mode(), preserved(inner, devices_of(inner)):
        capture = observe(request.model, batch, Points())
        scalar = evaluate(request.of, capture.outputs, batch, request.heads)
    return scalar.shape[2 if request.over_heads else 1 :]


def _leading(request: Request) -> tuple[int, ...]:
    if request.per == "batch":
        return ()
    groups = request.batch.groups
    return (len(groups.unique()),) if request.per == "group" and groups is not None else (len(request.batch),)


def _cost(request: Request, decision: Decision, targets: int) -> float:
    n = len(request.batch)
    cost = 0.0
    if decision.points:
        below = bool(request.points.inputs) and isinstance(request.inner, SharedBase)
        pulls = targets * ((request.heads or 1) if below and request.over_heads else 1)
        cost += _FORWARD + pulls * _PULLBACK
    if decision.params == "batch":
        joint = request.per == "group" and not examples_are_apart(request)
        cost += _FORWARD + (_leading(request)[0] if joint else 1) * targets * _BACKWARD
    elif decision.params in ("factors", "vmap"):
        cost += _FORWARD + targets * _BACKWARD
    elif decision.params == "loop":
        # one forward for all and a full backward each, or a forward and backward of one n-th of the batch each
        cost += _FORWARD + n * targets * _BACKWARD if decision.joint else _FORWARD + targets * _BACKWARD
    return cost


def _notes(request: Request, decision: Decision) -> list[str]:
    notes = []
    if isinstance(request.inner, (SharedBase, Ensemble)):
        heads = request.inner.heads if isinstance(request.inner, SharedBase) else request.inner.models
        aligned = aligned_heads(request.inner, heads)
        one_by_one = f"{len(heads)} heads one by one: {aligned}"
        notes.append(one_by_one if isinstance(aligned, str) else f"{len(heads)} heads in one vmapped pass")
    if request.points.attentions is not None:
        notes.append(f"attention maps: {request.points.attentions.how}")
    if decision.params == "vmap" and not request.differentiable:
        chunk = request.chunk_size or default_chunk(request)
        if chunk < len(request.batch):
            notes.append(f"{chunk} examples at a time")
    refusal = forward_refusal(request)
    if refusal is not None:
        notes.append(f"directional derivatives are taken from reverse mode: {refusal}")
    if checkpoints_activations(request.inner):
        notes.append("activations are not checkpointed inside: all of them are held until the backward")
    if decision.params == "loop":
        notes.append(
            "small forwards use the machine badly: one example at a time may take several times the stated cost"
        )
    return notes
