"""The third door of the engine: inner products of per-example parameter gradients, from layer factors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradreg.batch import check_chunk_size
from gradreg.engine._gradients import factors_of
from gradreg.engine._request import resolve
from gradreg.engine.factors import Factors
from gradreg.errors import GradregError
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Params


def collect_factors(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Params | tuple[Params, ...],
    *,
    each_target: bool = False,
    randomness: str = "different",
) -> Factors:
    r"""Return the per-example parameter gradients of a batch as layer factors, by one forward and backward.

    For a linear layer the gradient of example i is $\sum_t d_{it} a_{it}^\top$ with its input a and the gradient d at its
    output; inner products, norms and projections follow without it. Exact for all parameters: layers without a closed form
    are pulled back alone, and what no layer serves falls back to `gradients`; `coverage` says which.

    Args:
        model: Any module.
        batch: What `as_batch` reads.
        of: The scalar per example, `[n]` or `[n, *targets]`.
        wrt: The parameters.
        each_target: Rows are (example, target), example-major, one backward per target; else targets are summed.
        randomness: As in `gradients`, for parameters that no layer serves.

    Returns:
        The factors, `n` rows or `n` times the number of targets.

    Raises:
        GradregError: As `gradients`.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> import gradreg as gr
        >>> from gradreg.engine import collect_factors
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> batch = gr.Batch(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
        >>> factors = collect_factors(net, batch, gr.loss(F.cross_entropy), gr.Params("*"))
        >>> factors.dot(factors).shape, [row.rule for row in factors.coverage][:2]
        (torch.Size([5, 5]), ['linear', 'linear'])
    """
    request = resolve(model, batch, of, wrt, randomness=randomness)
    if request.points or not request.params:
        raise GradregError(f"wrt={wrt!r}: layer factors are of parameters; use Params(glob), or `gradients`.")
    return factors_of(request, each_target=each_target)


def products(
    model: nn.Module,
    a: Any,
    b: Any,
    of: ScalarFunction,
    wrt: Params | tuple[Params, ...],
    *,
    of_b: ScalarFunction | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    r"""Return the inner products of the parameter gradients of all examples of two batches, $\langle g_i, g_j \rangle$.

    From layer factors (`collect_factors`): for one position per layer $(a \cdot a')(d \cdot d')$, else the cheaper, layer by
    layer, of products of positions and of gradients written out, decided by counting. Per-example gradients of the whole
    model are never held.

    Args:
        model: Any module.
        a: A batch of n_a examples.
        b: A batch of n_b examples.
        of: The scalar per example; targets of an example are summed.
        wrt: The parameters.
        of_b: The scalar of `b`; None for the same.
        chunk_size: Examples of `a` at a time; None for all.

    Returns:
        `[n_a, n_b]`, in squared units of the gradients.

    Raises:
        GradregError: As `gradients`.

    References:
        Pruthi, Liu, Sundararajan, Kale 2020, arXiv 2002.08484 (TracIn); Goodfellow 2015, arXiv 1510.01799 (norms from the
        factors of linear layers).

    Example:
        >>> import torch, torch.nn.functional as F
        >>> import gradreg as gr
        >>> net = torch.nn.Linear(3, 2)
        >>> train = gr.Batch(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
        >>> test = gr.Batch(torch.randn(2, 3), torch.tensor([0, 1]))
        >>> gr.products(net, train, test, gr.loss(F.cross_entropy), gr.Params("*")).shape
        torch.Size([5, 2])
    """
    check_chunk_size(chunk_size)
    others = collect_factors(model, b, of if of_b is None else of_b, wrt)
    batch = resolve(model, a, of, wrt).batch
    parts = [collect_factors(model, part, of, wrt).dot(others) for part in batch.chunks(chunk_size or len(batch))]
    return torch.cat(parts)
