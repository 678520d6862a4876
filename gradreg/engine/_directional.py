"""The second door of the engine: directional derivatives by forward mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap

from gradreg.engine._checks import check_independent
from gradreg.engine._evaluate import evaluate
from gradreg.engine._gradients import gradients
from gradreg.engine._observe import observe
from gradreg.engine._request import Request, resolve
from gradreg.engine._routes import forward_refusal, note_forward_refusal, refusal_text
from gradreg.engine._tangent_rules import TangentRules
from gradreg.errors import GradregError, RouteError, ScalarError, SlowRouteWarning, UnknownNameError, closest, warn
from gradreg.model import devices_of, preserved, swapped, train_mode_batch_norms
from gradreg.scalars import AcrossHeads, ScalarFunction, across_heads
from gradreg.wrt import Wrt


def directional(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    directions: Tensor | Mapping[str, Tensor],
    *,
    at: Mapping[str, Tensor] | None = None,
    differentiable: bool = False,
    chunk_size: int | None = None,
    route: str = "auto",
) -> Tensor:
    r"""Return directional derivatives, $\sum_{\mathrm{key}} \langle \partial\,\mathrm{of} / \partial\,\mathrm{key}, v_d \rangle$.

    One forward pass with tangents per direction serves all targets at once. With `differentiable=True` the sums are taken
    from reverse-mode gradients, because differentiating a forward-mode pass is wrong through LayerNorm and some others in
    torch (pytorch/pytorch#196700). Models that do not run in forward mode get the same sums, with a `SlowRouteWarning` once;
    `plan` tells from then on.

    Args:
        model: Any module.
        batch: As in `gradients`.
        of: As in `gradients`.
        wrt: As in `gradients`.
        directions: From key to D directions: `[D, *shape of the whole tensor]` for inputs, features and activations
            (with their axis of examples), `[D, *shape]` for parameters. A tensor alone where there is one key.
        at: Values of `wrt` to evaluate at.
        differentiable: Keep the graph.
        chunk_size: Directions at a time; None: all at once.
        route: `"auto"`; `"forward"`, which raises where `"auto"` would fall back to gradients; or `"reverse"`.

    Returns:
        `[n, *targets, D]`, with heads `[n, K, *targets, D]`.

    Raises:
        GradregError: As `gradients`; also if directions do not fit.
        RouteError: If forward mode was asked for and cannot be taken.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Linear(3, 2)
        >>> x, v = torch.zeros(4, 3), torch.ones(1, 4, 3)
        >>> d = gr.directional(net, x, gr.logit(0), gr.Inputs(), v)
        >>> d.shape, torch.allclose(d, net.weight[0].sum().expand(4, 1))
        (torch.Size([4, 1]), True)
    """
    if route not in ("auto", "forward", "reverse"):
        raise GradregError(f"route={route!r}; allowed are 'auto', 'forward', 'reverse'.")
    request = resolve(model, batch, of, wrt, at=at, differentiable=differentiable, chunk_size=chunk_size)
    given = _named(request, directions)
    refusal = "differentiable=True takes sums from gradients" if differentiable else None
    if refusal is None and train_mode_batch_norms(request.inner):
        refusal = "BatchNorm in train mode"
    known = refusal or forward_refusal(request)
    if route != "reverse" and (known is None or (route == "forward" and refusal is None)):
        try:
            found = _forward(request, given)
            if request.points:
                points, heads = request.points, request.heads
                check_independent(request.inner, request.batch, request.of, points, heads, request.at_points())
            return found
        except GradregError:
            raise
        except (RuntimeError, NotImplementedError) as problem:
            # an operation without forward mode, or without a batching rule: reverse mode gives the same sums
            known = refusal_text(problem)
    if route == "forward":
        raise RouteError(f'route="forward" is refused ({known}); route="reverse" gives the same numbers.')
    result = _reverse(request, given)
    if route == "auto" and refusal is None and known is not None and note_forward_refusal(request, known):
        warn(
            f"{type(request.inner).__name__} does not run in forward mode ({known}); directional derivatives are taken from "
            "reverse-mode gradients instead, one backward per target.",
            SlowRouteWarning,
        )
    return result


def _named(request: Request, directions: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    keys = [*request.points.inputs, *request.points.activations, *request.params]
    keys += ["features"] if request.points.features else []
    if request.points.outputs:
        raise ScalarError("directional() moves what the outputs are computed from; Outputs() cannot be moved.")
    if isinstance(directions, Tensor):
        if len(keys) != 1:
            raise GradregError(
                f"directions is one tensor but wrt has {len(keys)} keys ({closest('', keys)}); give a mapping."
            )
        directions = {keys[0]: directions}
    given = dict(directions)
    if not given:
        raise GradregError("directions is empty.")
    for name in given:
        if name not in keys and name.partition("#")[0] not in request.points.activations:
            raise UnknownNameError(
                f"directions holds {name!r}, which is not among wrt; allowed are {closest(name, keys)}."
            )
    counts = {name: value.shape[0] if value.dim() else 0 for name, value in given.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise GradregError(f"directions disagree on their number D (the first axis): {counts}.")
    for name, value in given.items():
        expected = None
        if name in request.params:
            expected = request.params[name].shape
        elif name in request.points.inputs:
            expected = request.batch.named_inputs()[name].shape
        if expected is not None and value.shape[1:] != expected:
            raise GradregError(f"directions[{name!r}] has shape {tuple(value.shape)}; expected (D, {tuple(expected)}).")
    return given


def _forward(request: Request, directions: dict[str, Tensor]) -> Tensor:
    inner, at = request.inner, request.at_points()
    at_params = {**dict(request.params), **request.at_params()}
    moved = [name for name in directions if name in request.params]

    def scalar(shift: dict[str, Tensor]) -> Tensor:
        values = {name: at_params[name].detach() + shift[name] for name in moved}
        values.update({name: value for name, value in request.at_params().items() if name not in moved})
        with swapped(inner, values):
            capture = observe(
                inner,
                request.batch,
                request.points,
                at=at,
                shift={name: value for name, value in shift.items() if name not in moved},
                transformed=True,
            )
        return evaluate(request.of, capture.outputs, capture.batch, request.heads)

    zeros = {name: torch.zeros_like(value[0]) for name, value in directions.items()}

    def one(direction: dict[str, Tensor]) -> Tensor:
        result: Tensor = jvp(scalar, (zeros,), (direction,))[1]
        return result

    with torch.inference_mode(False), torch.no_grad(), preserved(inner, devices_of(inner)), TangentRules():
        result: Tensor = vmap(one, out_dims=-1, randomness="same", chunk_size=request.chunk_size)(directions)
    return result


def _reverse(request: Request, directions: dict[str, Tensor]) -> Tensor:
    """Contract reverse-mode gradients; with heads, the heads become targets, so that parameters keep them apart."""
    of, heads = request.of, request.heads
    if heads is not None and not isinstance(of, AcrossHeads):
        single = of
        of = across_heads(lambda outputs, batch: evaluate(single, outputs, batch, heads))
    request = replace(request, of=of)
    found = gradients(
        request.model, request.batch, of, request.wrt, at=request.at or None, differentiable=request.differentiable
    )
    total: Tensor | None = None
    for name, direction in directions.items():
        gradient = found[name]
        count = direction.shape[0]
        if name in request.params:
            size = direction[0].numel()
            term = (
                gradient.reshape(*gradient.shape[: gradient.dim() - direction.dim() + 1], size)
                @ direction.reshape(count, size).T
            )
        else:
            n, size = direction.shape[1], direction[0, 0].numel()
            leading = gradient.shape[: gradient.dim() - direction.dim() + 2]
            rows = gradient.reshape(n, -1, size) @ direction.reshape(count, n, size).permute(1, 2, 0)
            term = rows.reshape(*leading, count)
        total = term if total is None else total + term
    if total is None:
        raise GradregError("directions is empty.")
    return total
