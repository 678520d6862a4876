"""The first door of the engine: gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.engine._capture import capture_gradients
from gradreg.engine._params import check_on_few, loop_gradients, summed_gradients
from gradreg.engine._request import Request, resolve
from gradreg.engine._routes import Decision, decide, factors_refusal, note_vmap_refusal, refusal_text
from gradreg.engine._session import current_session
from gradreg.engine._vmapped import VMAP_FAULTS, vmapped_gradients
from gradreg.engine.factors import Factors, collect
from gradreg.errors import CompatibilityError, GradregError, RouteError, SlowRouteWarning, warn
from gradreg.model import train_mode_batch_norms
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Wrt


def gradients(
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
) -> dict[str, Tensor]:
    r"""Return the gradients of per-example scalars, $\partial\,\mathrm{of}(f(x_i), i) / \partial\,\mathrm{wrt}$.

    The model, its buffers, hooks and `.grad`, and the random streams are left as they were, also when the call raises.

    Args:
        model: Any module. With heads (`SharedBase`, `Ensemble`), `of` is given one head's outputs.
        batch: A `Batch`, a tensor, a pair `(inputs, targets)` or a mapping with `labels`.
        of: What is differentiated: `(outputs, batch) -> [n]` or `[n, *targets]`.
        wrt: With respect to what: `Inputs()`, `Features()`, `Outputs()`, `Activations(glob)`, `Embeddings()`,
            `AttentionMaps(layers)`, `Params(glob)`, or a tuple.
        per: `"example"`, or the sum over examples of every `"group"` (sorted by value) or of the `"batch"`.
        mean: Average over the examples of a group or batch instead of summing.
        at: Values of `wrt` to evaluate at, by result key.
        differentiable: Keep the graph: results can be differentiated again, with respect to live parameters and to inputs
            that require grad.
        randomness: `"different"`, `"same"` or `"error"`: the random numbers of examples under vmap.
        chunk_size: Examples at a time. None: all at once for points, within a share of memory for parameters.
        route: `"auto"`, `"capture"`, `"factors"`, `"vmap"`, `"batch"` or `"loop"`. All give the same numbers; see `plan`.

    Returns:
        From key to gradient. Keys are `"inputs"` or the input's name, `"features"`, `"outputs"`, module names (`name#k` for
        the k-th of several calls) and parameter names. Per example `[n, *targets, *shape]`; with heads
        `[n, K, *targets, *shape]` for points and, for parameters, the sum over heads `[n, *targets, *shape]`. Per group
        `[groups, ...]`, per batch without the first axis. What is not used has gradient zero. Attention maps have keys
        `module:attention`.

    Raises:
        GradregError: If something does not fit: `BatchError`, `UnknownNameError`, `ScalarError`, `HeadsError`,
            `CompatibilityError`, `CoupledExamplesError` (train-mode BatchNorm between `wrt` and `of`), `RouteError`.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> import gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> batch = gr.Batch(torch.zeros(5, 3), torch.tensor([0, 1, 0, 1, 1]))
        >>> {name: tuple(g.shape) for name, g in gr.gradients(net, batch, gr.loss(F.cross_entropy), gr.Params("0.*")).items()}
        {'0.weight': (5, 4, 3), '0.bias': (5, 4)}
    """
    session = current_session()
    if session is not None and session.might_serve(model, batch, per, at, differentiable, route):
        if per == "example":
            served = session.serve(of, wrt, batch)
        else:
            served = session.serve_sum(of, wrt, mean, differentiable) if batch is session.batch else None
        if served is not None:
            return served
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
    results = run(request, decide(request))
    if not differentiable:
        results = {name: value.detach() for name, value in results.items()}
    return results


def run(request: Request, decision: Decision) -> dict[str, Tensor]:
    """Take the decided routes."""
    results: dict[str, Tensor] = {}
    if decision.points == "capture":
        results.update(_reduced(request, capture_gradients(request)))
    elif decision.points == "loop":
        results.update(_reduced(request, capture_gradients(replace(request, chunk_size=1))))
    if decision.params == "batch":
        results.update(_summed(request))
    elif decision.params is not None:
        results.update(_per_example(request, decision))
    return results


def _per_example(request: Request, decision: Decision) -> dict[str, Tensor]:
    if decision.params == "factors":
        return _written_out(request)
    if decision.joint:
        return loop_gradients(request, joint=True)
    check_on_few(request, vmapped=decision.params == "vmap")
    if decision.params == "loop":
        return loop_gradients(request, joint=False)
    try:
        return vmapped_gradients(request)
    except GradregError:
        raise
    except VMAP_FAULTS as refusal:
        if request.randomness == "error" and "random" in str(refusal):
            raise CompatibilityError(
                'The model draws random numbers, which randomness="error" forbids; put it in eval mode, or ask for "different" '
                'or "same".'
            ) from refusal
        reason = refusal_text(refusal)
        if request.route == "vmap":
            raise RouteError(
                f'route="vmap" is refused by the model ({reason}). route="loop" works for any model.'
            ) from refusal
        result = loop_gradients(request, joint=False)  # a fault of the model itself is raised again here
        if note_vmap_refusal(request, reason):
            warn(
                f"{type(request.inner).__name__} does not run under torch.func.vmap ({reason}); per-example gradients take "
                "one forward and backward per example instead.",
                SlowRouteWarning,
            )
        return result


def _written_out(request: Request) -> dict[str, Tensor]:
    """Write out the gradients that the factors stand for, a chunk of examples at a time."""
    parts: list[dict[str, Tensor]] = []
    for chunk in request.batch.chunks(request.chunk_size or len(request.batch)):
        factors = factors_of(replace(request, batch=chunk), each_target=True)
        n, targets = len(chunk), factors.targets
        parts.append(
            {
                name: factors.gradient(name).reshape(n, *targets, *parameter.shape).to(parameter.dtype)
                for name, parameter in request.params.items()
            }
        )
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]


def factors_of(request: Request, *, each_target: bool = False) -> Factors:
    """Return the layer factors of the parameters of a request; parameters that no layer serves take another route."""
    refusal = factors_refusal(request, train_mode_batch_norms(request.inner))
    return collect(request, _fallen_back, each_target=each_target, refusal=refusal)


def _fallen_back(request: Request, params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    rest = replace(request, params=params, route="auto")
    found = _per_example(rest, decide(rest, factors=False))
    return {name: value.detach() for name, value in found.items()}


def _members(request: Request) -> list[Tensor]:
    groups = request.batch.groups
    if request.per == "batch" or groups is None:
        return [torch.ones(len(request.batch), dtype=torch.bool)]
    return [groups == value for value in groups.unique(sorted=True)]


def _summed(request: Request) -> dict[str, Tensor]:
    sums = summed_gradients(request, _members(request))
    return {name: value.squeeze(0) for name, value in sums.items()} if request.per == "batch" else sums


def _reduced(request: Request, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum per-example gradients at points over groups or the batch."""
    if request.per == "example":
        return results
    members = _members(request)
    reduce = torch.Tensor.mean if request.mean else torch.Tensor.sum
    sums = {name: torch.stack([reduce(value[mask], 0) for mask in members]) for name, value in results.items()}
    return {name: value.squeeze(0) for name, value in sums.items()} if request.per == "batch" else sums


def parameter_gradients(scalar: Tensor, model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradient of a scalar with respect to every trainable parameter, None where it is disconnected.

    The graph is kept; `.grad` is not touched.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not named or not scalar.requires_grad:
        return dict.fromkeys(named)
    found = torch.autograd.grad(scalar, list(named.values()), retain_graph=True, allow_unused=True)
    return dict(zip(named, found, strict=True))
