"""Routes batch and loop: gradients with respect to parameters, per example or summed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._checks import check_independent, closes_over
from gradreg.engine._coupling import check_uncoupled
from gradreg.engine._evaluate import check_targets, evaluate
from gradreg.engine._observe import Capture, grad_mode, observe, usable
from gradreg.engine._points import Points
from gradreg.engine._pull import warn_disconnected
from gradreg.engine._recomputation import without_recomputation
from gradreg.engine._recorder import attached
from gradreg.engine._request import Request
from gradreg.engine._scale import scaled, unscaled
from gradreg.errors import CompatibilityError, CoupledExamplesError, GradregError
from gradreg.model import (
    call,
    cloned_buffers,
    devices_of,
    differentiable_kernels,
    preserved,
    preserved_random_state,
    swapped,
    train_mode_batch_norms,
)
from gradreg.scalars import scalar_key

# Whether examples of a model and a scalar were found apart from each other
_APART: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], bool]] = WeakKeyDictionary()


def selected_values(request: Request) -> dict[str, Tensor]:
    """Return the tensors to differentiate with respect to: live parameters, or the values in `at`."""
    at = request.at_params()
    return {
        name: attached(at[name], keep_graph=request.differentiable) if name in at else parameter
        for name, parameter in request.params.items()
    }


def loop_gradients(request: Request, *, joint: bool) -> dict[str, Tensor]:
    """Return per-example parameter gradients one example at a time.

    Args:
        request: The request.
        joint: Run one forward of the whole batch and pull each example's scalar back, instead of one forward each. Right
            also where a normalization over the batch lies before the parameters.
    """
    with grad_mode(), preserved(request.inner, devices_of(request.inner)):
        selected = selected_values(request)
        rows: list[dict[str, Tensor | None]] = []
        shared = _scalars(request, request.batch, selected) if joint else None
        for i in range(len(request.batch)):
            if shared is not None:
                scalar = shared[i]
            else:
                again = (
                    preserved_random_state(devices_of(request.inner)) if request.randomness == "same" else nullcontext()
                )
                with again, swapped(request.inner, cloned_buffers(request.inner)):  # nor what another forward wrote
                    scalar = _scalars(request, request.batch[i : i + 1], selected, slice(i, i + 1))[0]
            rows.append(pulled(scalar, selected, request.differentiable))
    if all(gradient is None for row in rows for gradient in row.values()):
        warn_disconnected(request.of, selected)
    return stacked(rows, selected, scalar.shape)


def summed_gradients(request: Request, members: list[Tensor]) -> dict[str, Tensor]:
    """Return parameter gradients of sums, or means, of scalars.

    Where examples do not mix, every set of examples runs forward and backward alone: all sets together cost one of each.
    Otherwise there is one forward, and one backward of the whole batch per set.

    Args:
        request: The request.
        members: Boolean masks `[n]`, one per sum.

    Returns:
        From parameter name to `[len(members), *targets, *shape]`.
    """
    apart = len(members) > 1 and examples_are_apart(request)

    def total(scalars: Tensor) -> Tensor:  # a mean here costs nothing; a quotient of gradients does
        return scalars.mean(0) if request.mean else scalars.sum(0)

    with grad_mode(), preserved(request.inner, devices_of(request.inner)):
        selected = selected_values(request)
        if apart:
            sums = []
            for place in (mask.nonzero().squeeze(1) for mask in members):
                with swapped(request.inner, cloned_buffers(request.inner)):  # not what another forward wrote
                    sums.append(total(_scalars(request, request.batch[place], selected, place)))
        else:
            scalars = _scalars(request, request.batch, selected, coupled_is_fine=request.per == "batch")
            sums = [total(scalars if request.per == "batch" else scalars[mask]) for mask in members]
        rows = [pulled(one, selected, request.differentiable) for one in sums]
    if all(gradient is None for row in rows for gradient in row.values()):
        warn_disconnected(request.of, selected)
    return stacked(rows, selected, sums[0].shape)


def examples_are_apart(request: Request) -> bool:
    """Whether the scalars of some examples are the same without the others; looked at once per model and scalar."""
    known = _APART.setdefault(request.inner, {})
    key = (*scalar_key(request.of), request.inner.training)
    if key not in known:
        known[key] = _looks_apart(request)
    return known[key]


def _looks_apart(request: Request) -> bool:
    inner = request.inner
    if train_mode_batch_norms(inner) or len(request.batch) < 2:
        return False
    floating = tuple(
        name
        for name, value in request.batch.named_inputs().items()
        if isinstance(value, Tensor) and value.is_floating_point()
    )
    try:
        # by gradients, which random numbers do not disturb; by values, which also see what reads integers
        if floating:
            check_independent(inner, request.batch, request.of, Points(inputs=floating), request.heads, {})
        elif _plain_scalars(request, usable(request.batch[:3]))[1]:
            return False
        check_alone(replace(request, at={}))
    except (GradregError, RuntimeError, ValueError, IndexError, TypeError):
        return False  # mixed, or of a fixed batch size: the joint forward is right, or says what is wrong
    return True


def check_on_few(request: Request, *, vmapped: bool) -> None:
    """Look at three examples at once, for the routes that only ever show the model one.

    Alone, a scalar that is reduced over the batch looks right, examples that are mixed look independent, and under vmap a
    scalar that is cut from the graph gives zeros.
    """
    batch = usable(request.batch[:3])
    with grad_mode(), preserved(request.inner, devices_of(request.inner)):
        outputs = _plain_outputs(request, batch)
        check_targets(request.of, outputs, request.batch)
        try:
            scalars = evaluate(request.of, outputs, batch, request.heads)
        except (RuntimeError, IndexError) as problem:
            raise closes_over(request.of, problem) from problem
        _check_attached(request, scalars)
        found = torch.autograd.grad(scalars.sum(), list(request.params.values()), allow_unused=True)
    if vmapped and all(gradient is None for gradient in found):
        warn_disconnected(request.of, request.params)
    check_alone(request)


def check_alone(request: Request) -> None:
    """Refuse models and scalars for which an example alone is not what it is among others.

    Raises:
        CoupledExamplesError: If the first or last of three examples gives another scalar alone. Models that draw random
            numbers cannot be compared.
    """
    batch = usable(request.batch[:3])
    if len(batch) < 2:
        return
    together, drawn = _plain_scalars(request, batch)
    if drawn:
        return
    tolerance = 100 * torch.finfo(together.dtype).eps ** 0.75 * float(together.abs().max().clamp(min=1))
    for example in (0, len(batch) - 1):
        alone, _ = _plain_scalars(request, batch[example : example + 1])
        difference = float((alone[0] - together[example]).abs().max())
        if difference > tolerance:
            raise CoupledExamplesError(
                f"The scalar of an example alone differs from its value beside others, by {difference:.3g}: the model or "
                f"of={request.of!r} mixes examples, and a per-example gradient does not exist, or depends on how the batch is "
                "split."
            )


def _plain_scalars(request: Request, batch: Batch) -> tuple[Tensor, bool]:
    """Return scalars without graph, and whether random numbers were drawn."""
    inner = request.inner
    with torch.inference_mode(False), torch.no_grad(), preserved(inner, devices_of(inner)):
        before = torch.get_rng_state()
        scalars = evaluate(request.of, _plain_outputs(request, batch), batch, request.heads)
        return scalars, not torch.equal(before, torch.get_rng_state())


def _plain_outputs(request: Request, batch: Batch) -> Any:
    with differentiable_kernels(request.inner, twice=False):
        return call(request.inner, batch.map(torch.Tensor.clone))


def _check_attached(request: Request, scalars: Tensor) -> None:
    if not scalars.requires_grad:
        raise CompatibilityError(
            f"of={request.of!r} carries no graph to the parameters {', '.join(map(repr, list(request.params)[:3]))}...: is the "
            "path cut by detach() or no_grad()?"
        )


def _scalars(
    request: Request,
    batch: Batch,
    selected: dict[str, Tensor],
    rows: slice | Tensor | None = None,
    coupled_is_fine: bool = False,
) -> Tensor:
    """Evaluate `of` on one forward: `[n, *targets]`, summed over heads.

    Args:
        request: The request.
        batch: Its batch, or part of it.
        selected: The tensors to differentiate with respect to.
        rows: Which part of the request's batch that is.
        coupled_is_fine: Whether a normalization over the batch may lie between.
    """
    at = request.at_points()
    if rows is not None:
        at = {name: value[rows] for name, value in at.items()}
    replaced = {name: value for name, value in selected.items() if name in request.at}
    with swapped(request.inner, replaced), without_recomputation() if replaced else nullcontext():
        capture: Capture = observe(
            request.model if not replaced else request.inner,
            batch,
            request.points.only(request.at) if at else Points(),
            at=at,
            differentiable=request.differentiable,
            copies=False,
        )
    check_targets(request.of, capture.outputs, batch)
    scalars = evaluate(request.of, capture.outputs, capture.batch, request.heads)
    _check_attached(request, scalars)
    if not coupled_is_fine:
        check_uncoupled(scalars, selected.values(), capture.normalized, "the parameters")
    return scalars.sum(1) if request.over_heads else scalars


def pulled(scalar: Tensor, selected: dict[str, Tensor], differentiable: bool) -> dict[str, Tensor | None]:
    """Return gradients `[*targets, *shape]`, None where no target uses a parameter."""
    columns = [
        torch.autograd.grad(
            value, list(selected.values()), retain_graph=True, create_graph=differentiable, allow_unused=True
        )
        for value in scaled(scalar).reshape(-1)
    ]
    found: dict[str, Tensor | None] = {}
    for position, (name, tensor) in enumerate(selected.items()):
        column = [column[position] for column in columns]
        if all(gradient is None for gradient in column):
            found[name] = None
            continue
        if len(column) == 1 and column[0] is not None:
            found[name] = column[0].reshape((*scalar.shape, *tensor.shape))
            continue
        filled = [torch.zeros_like(tensor) if gradient is None else gradient for gradient in column]
        found[name] = torch.stack(filled).reshape((*scalar.shape, *tensor.shape))
    return found


def stacked(
    rows: list[dict[str, Tensor | None]], selected: dict[str, Tensor], targets: torch.Size
) -> dict[str, Tensor]:
    """Stack rows of gradients, with zeros where a parameter is not used."""
    results = {}
    for name, tensor in selected.items():
        column = [tensor.new_zeros((*targets, *tensor.shape)) if (own := row[name]) is None else own for row in rows]
        results[name] = unscaled(torch.stack(column) if len(column) > 1 else column[0].unsqueeze(0))
    return results
