"""The naive truth: what `gradreg.gradients` and `gradreg.directional` must return, in the slowest and plainest way.

One ordinary forward of the model on the whole batch, ordinary hooks, and one call of `torch.autograd.grad` per example,
per target and per head. No torch.func, no vmap, nothing from `gradreg.engine`. Use it to check a fast implementation of
your own on a small batch; its cost is `n * K * targets` backward passes.

Models must be deterministic here: two forwards draw different dropout masks, so nothing could be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradreg.batch import Batch, as_batch
from gradreg.errors import BatchError, CoupledExamplesError, GradregError
from gradreg.scalars import AcrossHeads, ScalarFunction, bind, check_scalar
from gradreg.testing._plain_forward import PlainWeightNorm, Point, nothing_changed, run
from gradreg.wrt import Wrt, as_wrt

__all__ = ["directional", "gradients", "pairwise_alignment", "random_functional", "second_derivative"]

Per = Literal["example", "group", "batch"]
Similarity = Literal["dot", "cosine", "cosine_squared", "dot_squared", "abs_cosine"]


def gradients(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    *,
    per: Per = "example",
    mean: bool = False,
    at: Mapping[str, Tensor] | None = None,
    differentiable: bool = False,
) -> dict[str, Tensor]:
    """Return what `gradreg.gradients` must return for the same arguments, by plain loops.

    Args:
        model: Any module; `SharedBase` and `Ensemble` are run one head at a time.
        batch: Whatever `gradreg.as_batch` reads.
        of: The scalar `(outputs, batch) -> [n]` or `[n, *targets]`.
        wrt: One description or a tuple of them.
        per: One gradient per example, per group of `batch.groups` (sorted by value), or for the whole batch. Groups and
            batches are the sums of their examples.
        mean: Divide these sums by the number of examples.
        at: Other values of some of the variables in `wrt`, by key, at which the gradient is taken.
        differentiable: Keep the graph, so that the result can be differentiated again.

    Returns:
        By key, `[n, *targets, *wrt_shape]`; with heads `[n, K, *targets, *wrt_shape]`, except parameters, which are
        summed over the heads. `n` becomes the number of groups with `per="group"` and is dropped with `per="batch"`.

    Raises:
        CoupledExamplesError: If the scalar of one example depends on the values of another one.
        GradregError: If something that was named does not exist.

    Example:
        >>> import torch, gradreg as gr
        >>> from gradreg.testing import reference
        >>> net = torch.nn.Linear(3, 2)
        >>> reference.gradients(net, torch.zeros(4, 3), gr.all_logits(), gr.Inputs())["inputs"].shape
        torch.Size([4, 2, 3])
    """
    batch = as_batch(batch)
    table, has_heads, parameters = _per_head(model, batch, of, wrt, at, differentiable)
    result = {}
    for key, value in table.items():  # [n, K, *targets, *shape]
        if not has_heads:
            value = value[:, 0]
        elif key in parameters:
            value = value.sum(1)
        result[key] = _reduce(value, batch, per, mean)
    return result


def directional(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    directions: Tensor | Mapping[str, Tensor],
    *,
    at: Mapping[str, Tensor] | None = None,
    differentiable: bool = False,
) -> Tensor:
    """Return what `gradreg.directional` must return: inner products of explicit gradients with the directions.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: As in `gradients`.
        wrt: As in `gradients`.
        directions: By key, `[D, *value_shape]`, where the value is the whole tensor with the example first; a bare
            tensor where `wrt` has one key.
        at: As in `gradients`.
        differentiable: As in `gradients`.

    Returns:
        `[n, *targets, D]`, with heads `[n, K, *targets, D]`: sums over keys of the inner product of an example's
        gradient with the example's part of the direction.

    Raises:
        GradregError: If the keys of the directions are not those of `wrt`.

    Example:
        >>> import torch, gradreg as gr
        >>> from gradreg.testing import reference
        >>> net = torch.nn.Linear(3, 2)
        >>> reference.directional(net, torch.zeros(4, 3), gr.all_logits(), gr.Inputs(), torch.ones(5, 4, 3)).shape
        torch.Size([4, 2, 5])
    """
    batch = as_batch(batch)
    table, has_heads, _ = _per_head(model, batch, of, wrt, at, differentiable, keep_layout=True)
    if isinstance(directions, Tensor):
        directions = dict.fromkeys(table, directions)
    if set(directions) != set(table):
        raise GradregError(f"directions has the keys {sorted(directions)}, but wrt has {sorted(table)}.")
    total: Tensor | float = 0.0
    for key, gradient in table.items():  # gradient [n, K, *targets, *value_shape], zero outside the example
        flat = directions[key].flatten(1) if directions[key].dim() > 1 else directions[key][:, None]
        leading = gradient.shape[: gradient.dim() - directions[key].dim() + 1]
        total = total + gradient.reshape(*leading, -1) @ flat.T
    assert isinstance(total, Tensor)
    return total if has_heads else total[:, 0]


def random_functional(result: Mapping[str, Tensor], seed: int = 0) -> Tensor:
    r"""A fixed smooth scalar of gradients, $\sum a \sin(b\,g + c)$ with random $a$, $b$, $c$ for every entry.

    No entry's contribution cancels another's, and the second derivative does not vanish, so two implementations that
    agree in the gradient of this number agree in the second derivatives.

    Args:
        result: Gradients by key.
        seed: Of the random coefficients, which depend on nothing else but the keys and shapes.

    Example:
        >>> import torch
        >>> from gradreg.testing import reference
        >>> reference.random_functional({"inputs": torch.zeros(2, 3)}, seed=1).shape
        torch.Size([])
    """
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for key in sorted(result):
        value = result[key].double()
        a, b, c = (torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.5 for _ in range(3))
        total = total + (a * torch.sin(b * value + c)).sum()
    return total


def second_derivative(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    seed: int = 0,
    *,
    gradients: Callable[..., dict[str, Tensor]] = gradients,
    **options: Any,
) -> dict[str, Tensor]:
    """Differentiate `random_functional` of the gradients with respect to every parameter that requires grad.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: As in `gradients`.
        wrt: As in `gradients`.
        seed: Of the functional.
        gradients: The implementation to use; give the fast one here and compare.
        options: Passed on to it.

    Returns:
        The gradient of the functional by parameter name; zeros where it does not depend on the parameter.

    Example:
        >>> import torch, gradreg as gr
        >>> from gradreg.testing import reference
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> truth = reference.second_derivative(net, torch.ones(2, 3), gr.logit(0), gr.Inputs())
        >>> sorted(truth)
        ['0.bias', '0.weight', '2.bias', '2.weight']
    """
    with torch.enable_grad():
        number = random_functional(gradients(model, batch, of, wrt, differentiable=True, **options), seed)
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        parameters = [model.get_parameter(name) for name in names]
        if not number.requires_grad or not parameters:
            return {name: torch.zeros_like(parameter) for name, parameter in zip(names, parameters, strict=True)}
        found = torch.autograd.grad(number, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def pairwise_alignment(
    gradients: Tensor, similarity: Similarity = "cosine_squared", *, mean: bool = False, eps: float = 1e-12
) -> Tensor:
    r"""How similar the gradients of K heads are, summed over pairs i < j by a double loop, for every example.

    With $u_i = g_i / \sqrt{\lVert g_i \rVert^2 + \epsilon}$: `dot` $g_i \cdot g_j$, `dot_squared` its square, `cosine`
    $u_i \cdot u_j$, `cosine_squared` its square, `abs_cosine` its absolute value.

    Args:
        gradients: `[n, K, ...]`; the axes after K are one vector.
        similarity: Which similarity.
        mean: Average over pairs instead of summing.
        eps: Inside each norm.

    Returns:
        `[n]`.

    Raises:
        GradregError: If there are fewer than two heads or no such similarity.

    Example:
        >>> import torch
        >>> from gradreg.testing import reference
        >>> reference.pairwise_alignment(torch.tensor([[[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]]]), "dot")
        tensor([3.])
    """
    vectors = gradients.flatten(2)
    n, heads = vectors.shape[:2]
    if heads < 2:
        raise GradregError("There is one head: nothing to compare.")
    totals = []
    for example in range(n):
        total = vectors.new_zeros(())
        for i in range(heads):
            for j in range(i + 1, heads):
                total = total + _similarity(vectors[example, i], vectors[example, j], similarity, eps)
        totals.append(total / (heads * (heads - 1) / 2) if mean else total)
    return torch.stack(totals)


def _similarity(first: Tensor, second: Tensor, similarity: str, eps: float) -> Tensor:
    dot = (first * second).sum()
    cosine = dot / ((first * first).sum() + eps).sqrt() / ((second * second).sum() + eps).sqrt()
    known = {
        "dot": dot,
        "dot_squared": dot * dot,
        "cosine": cosine,
        "cosine_squared": cosine * cosine,
        "abs_cosine": cosine.abs(),
    }
    if similarity not in known:
        raise GradregError(f"similarity={similarity!r}; allowed are {', '.join(known)}.")
    return known[similarity]


def _per_head(
    model: nn.Module,
    batch: Batch,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    at: Mapping[str, Tensor] | None,
    differentiable: bool,
    keep_layout: bool = False,
) -> tuple[dict[str, Tensor], bool, set[str]]:
    """All gradients as `[n, K, *targets, *shape]` (K = 1 without heads), whether there are heads, and parameters' keys.

    With `keep_layout` the shape is that of the whole variable, example first; what is not the example's is zero.
    """
    items = as_wrt(wrt)
    of = bind(of, model)
    mixes_heads = isinstance(of, AcrossHeads)
    with torch.enable_grad(), nothing_changed(model), sdpa_kernel(SDPBackend.MATH), PlainWeightNorm():
        forward = run(model, batch, items, dict(at or {}), differentiable, mixes_heads, getattr(of, "output", None))
        scalars = [check_scalar(of(outputs, forward.batch), len(batch), of) for outputs in forward.outputs]
        rows: dict[str, list[Tensor]] = {key: [] for key in forward.points}
        for example in range(len(batch)):
            for head, scalar in enumerate(scalars):
                for key, gradient in _one_head(
                    scalar, forward.points, example, head, mixes_heads, differentiable
                ).items():
                    targets = scalar.dim() - 1  # these axes come first
                    axis = forward.points[key].batch_axis
                    if axis is not None:
                        gradient = gradient.movedim(targets + axis, targets)
                        _check_uncoupled(gradient, key, example, targets)
                        gradient = gradient if keep_layout else gradient.select(targets, example)
                    rows[key].append(gradient)
    stacked = {key: torch.stack(value).unflatten(0, (len(batch), len(scalars))) for key, value in rows.items()}
    if not differentiable:
        stacked = {key: value.detach() for key, value in stacked.items()}
    parameters = {key for key, point in forward.points.items() if point.batch_axis is None}
    return stacked, forward.has_heads and not mixes_heads, parameters


def _one_head(
    scalar: Tensor, points: Mapping[str, Point], example: int, head: int, mixes_heads: bool, differentiable: bool
) -> dict[str, Tensor]:
    """Gradients `[*targets, *value_shape]` of one example's scalars, one target after another."""
    variables = {key: point.of_head(head) for key, point in points.items()}
    targets = scalar.shape[1:]
    found: dict[str, list[Tensor]] = {key: [] for key in variables}
    for target in itertools.product(*(range(size) for size in targets)):
        number = scalar[(example, *target)]
        if number.requires_grad:
            rows = torch.autograd.grad(
                number,
                list(variables.values()),
                create_graph=differentiable,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        else:
            rows = tuple(torch.zeros_like(variable) for variable in variables.values())
        for key, row in zip(variables, rows, strict=True):
            found[key].append(row)
    return {key: torch.stack(value).unflatten(0, targets) if targets else value[0] for key, value in found.items()}


def _check_uncoupled(gradient: Tensor, key: str, example: int, targets: int) -> None:
    """Refuse a gradient that reaches other examples."""
    size = gradient.detach().abs().movedim(targets, 0)
    size = size.reshape(len(size), -1).amax(1)
    others = size[torch.arange(len(size)) != example]
    if len(others) and float(others.max()) > 1e-9 * float(size.max()):
        raise CoupledExamplesError(f"The scalar of example {example} depends on {key!r} of other examples.")


def _reduce(value: Tensor, batch: Batch, per: str, mean: bool) -> Tensor:
    """Sum or average `[n, ...]` over groups or the batch."""
    if per == "example":
        return value
    if per == "batch":
        return value.mean(0) if mean else value.sum(0)
    if per != "group":
        raise GradregError(f'per={per!r}; allowed are "example", "group" and "batch".')
    if batch.groups is None:
        raise BatchError('per="group" needs groups, but the batch has none.')
    members = [value[batch.groups == group] for group in batch.groups.unique(sorted=True)]
    return torch.stack([rows.mean(0) if mean else rows.sum(0) for rows in members])
