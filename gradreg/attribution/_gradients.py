"""Attributions from gradients at the input itself, or around it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.attribution._accumulate import Task, accumulated
from gradreg.attribution._assemble import assembled, scalars_of
from gradreg.attribution._draws import check_samples, generator_of
from gradreg.attribution._path import Path
from gradreg.attribution._result import Attribution
from gradreg.attribution._sources import Sources, chosen_per, read_sources
from gradreg.batch import as_batch, check_chunk_size
from gradreg.engine import gradients
from gradreg.errors import GradregError
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Wrt

__all__ = ["input_x_gradient", "saliency", "smooth_grad"]


def saliency(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    *,
    per: str = "auto",
    norm: float = 2.0,
    differentiable: bool = False,
    chunk_size: int | None = None,
) -> Attribution:
    r"""Sizes of gradients: $|\partial f / \partial x|$ per feature, the norm of a token's gradient per token.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: As in `gradients`.
        wrt: As in `integrated_gradients`.
        per: As in `integrated_gradients`.
        norm: The p of the norm of a token's gradient: 1, 2 or `math.inf` (largest feature).
        differentiable: Keep the graph to all parameters.
        chunk_size: Examples at a time.

    Returns:
        Scores `[n, *targets, L]` per token, `[n, *targets, *shape]` per feature, in units of the target per unit of the value.

    Raises:
        GradregError: If something does not fit.

    References:
        Simonyan, Vedaldi, Zisserman 2013, arXiv 1312.6034, section 3 (norm=math.inf over the channels of a pixel).

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Linear(3, 2)
        >>> a = gr.saliency(net, torch.zeros(4, 3), gr.all_logits(), gr.Inputs(), per="feature")
        >>> torch.equal(a.scores[0], net.weight.abs())
        True
    """
    task, sources, per = _begun(model, batch, of, wrt, per, differentiable)
    found = _mean_gradients(task, sources, chunk_size, 1, None)
    return _sized(task, sources, found, "saliency", per, norm, {"norm": norm}, signed=False)


def smooth_grad(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    *,
    std: float,
    relative: bool = False,
    n_samples: int = 50,
    per: str = "auto",
    norm: float = 2.0,
    generator: torch.Generator | None = None,
    differentiable: bool = False,
    chunk_size: int | None = None,
) -> Attribution:
    r"""The gradient averaged over noise, $\mathbb{E}_{\epsilon \sim N(0, \sigma^2)} \nabla f(x + \epsilon)$, with its sign.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: As in `gradients`.
        wrt: As in `integrated_gradients`.
        std: $\sigma$, in units of the value; with `relative` as a share of the range (maximum minus minimum) of each example.
        relative: Whether std is a share.
        n_samples: Draws of noise per example.
        per: `"feature"`: the mean gradient itself; `"token"`: the norm of a token's mean gradient; `"auto"`: by the shape, as in
            `integrated_gradients`.
        norm: As in `saliency`.
        generator: Random numbers; None: one of its own with seed 0. The global streams are left alone.
        differentiable: Keep the graph to all parameters.
        chunk_size: Noisy examples at a time.

    Returns:
        Scores as `saliency`.

    Raises:
        GradregError: If something does not fit.

    References:
        Smilkov, Thorat, Kim, Viégas, Wattenberg 2017, arXiv 1706.03825.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Linear(3, 2)
        >>> a = gr.smooth_grad(net, torch.zeros(4, 3), gr.all_logits(), gr.Inputs(), std=0.1, per="feature")
        >>> torch.allclose(a.scores[0], net.weight)
        True
    """
    if isinstance(std, bool) or not isinstance(std, (int, float)) or not 0 <= std < math.inf:
        raise GradregError(f"std={std!r}; allowed are numbers from 0.")
    check_samples(n_samples, 1)
    check_chunk_size(chunk_size)
    own = generator_of(generator)
    task, sources, per = _begun(model, batch, of, wrt, per, differentiable)

    def noisy(value: Tensor) -> Tensor:
        noise = torch.randn(value.shape, generator=own, device=own.device, dtype=torch.float64).to(value)
        flat = value.detach().flatten(1) if value.dim() > 1 else value.detach().unsqueeze(1)
        width = flat.amax(1) - flat.amin(1) if relative else torch.ones_like(flat[:, 0])
        return value + std * width.reshape(-1, *[1] * (value.dim() - 1)) * noise

    found = _mean_gradients(task, sources, chunk_size, n_samples, noisy)
    settings = {"std": std, "relative": relative, "samples": n_samples, "norm": norm}
    return _sized(task, sources, found, "smooth_grad", per, norm, settings, signed=True)


def input_x_gradient(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    *,
    per: str = "auto",
    differentiable: bool = False,
    chunk_size: int | None = None,
    show_progress: bool | None = None,
    route: str = "auto",
) -> Attribution:
    r"""The value times its gradient, $x \odot \nabla f(x)$, summed over features per token; for all targets at once.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: As in `gradients`.
        wrt: As in `integrated_gradients`.
        per: As in `integrated_gradients`.
        differentiable: Keep the graph to all parameters.
        chunk_size: As in `integrated_gradients`.
        show_progress: As in `integrated_gradients`.
        route: As in `integrated_gradients`.

    Returns:
        Scores `[n, *targets, L]` per token, `[n, *targets, *shape]` per feature, in units of the target.

    Raises:
        GradregError: If something does not fit.

    References:
        Shrikumar, Greenside, Shcherbina, Kundaje 2016, arXiv 1605.01713.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Linear(3, 2)
        >>> a = gr.input_x_gradient(net, 2 * torch.ones(4, 3), gr.all_logits(), gr.Inputs(), per="feature")
        >>> torch.allclose(a.scores[0], 2 * net.weight)
        True
    """
    task, sources, per = _begun(model, batch, of, wrt, per, differentiable)
    zeros = {
        key: sources.where_real(key, torch.zeros_like(value).unsqueeze(0)) for key, value in sources.values.items()
    }
    value = next(iter(sources.values.values()))
    whole = torch.ones(1, 1, dtype=torch.float64, device=value.device)
    path = Path(sources, zeros, whole.expand(len(value), 1), whole[0].long() - 1, whole, replace=False)
    with torch.set_grad_enabled(differentiable):
        scalars = scalars_of(task, sources)
        options: dict[str, Any] = {"route": route, "chunk_size": chunk_size, "show_progress": show_progress}
        sums, work = accumulated(task, path, per, scalars.shape[task.leading :], what="input_x_gradient", **options)
        by_key = {key: total[0] for key, total in sums.items()}
        made = {"plan": str(work)}
        return assembled(task, sources, by_key, method="input_x_gradient", per=per, scalars=scalars, provenance=made)


def _begun(
    model: nn.Module, batch: Any, of: ScalarFunction, wrt: Any, per: str, differentiable: bool
) -> tuple[Task, Sources, str]:
    batch = as_batch(batch)
    task = Task.bound(model, batch, of, wrt, differentiable)
    sources = read_sources(model, batch, wrt, differentiable=differentiable)
    return task, sources, chosen_per(per, sources.values)


def _mean_gradients(
    task: Task, sources: Sources, chunk_size: int | None, samples: int, moved: Callable[[Tensor], Tensor] | None
) -> dict[str, Tensor]:
    """Return the gradients averaged over samples of moved values, `[n, (K,) *targets, *shape]`, zero at padded positions.

    Without a move they are those at the input itself.
    """
    n = len(task.batch)
    together = samples if chunk_size is None else max(1, min(samples, chunk_size // n))
    totals: dict[str, Tensor] = {}
    with torch.set_grad_enabled(task.differentiable):
        for first in range(0, samples, together):
            count = min(together, samples - first)
            at: dict[str, Tensor] = {}
            if moved is not None:
                drawn = [{key: moved(value) for key, value in sources.values.items()} for _ in range(count)]
                at = {key: torch.cat([own[key] for own in drawn]) for key in sources.values}
            found = gradients(
                task.model,
                task.batch if count == 1 else task.batch[torch.arange(n).repeat(count)],
                task.of,
                task.wrt,
                at=at,
                differentiable=task.differentiable,
                chunk_size=chunk_size,
            )
            for key, gradient in found.items():
                part = gradient.unflatten(0, (count, n)).sum(0) / samples
                totals[key] = totals[key] + part if key in totals else part
        return {key: _without_padding(sources, key, total) for key, total in totals.items()}


def _without_padding(sources: Sources, key: str, gradient: Tensor) -> Tensor:
    if key not in sources.valid:
        return gradient
    valid, axes = sources.valid[key], sources.values[key].dim() - 1
    between = gradient.dim() - 1 - axes
    return gradient * valid.reshape(len(valid), *[1] * between, -1, *[1] * (axes - 1))


def _sized(
    task: Task,
    sources: Sources,
    found: dict[str, Tensor],
    method: str,
    per: str,
    norm: float,
    settings: dict[str, Any],
    *,
    signed: bool,
) -> Attribution:
    if norm not in (1, 2, math.inf):
        raise GradregError(f"norm={norm!r}; allowed are 1, 2 and math.inf.")
    with torch.set_grad_enabled(task.differentiable):
        scalars = scalars_of(task, sources)
        by_key = {}
        for key, gradient in found.items():
            axes = sources.values[key].dim() - 1
            if per == "feature":
                by_key[key] = gradient if signed else gradient.abs()
            else:
                by_key[key] = _norm(
                    gradient.flatten(gradient.dim() - axes + 1) if axes > 1 else gradient[..., None], norm
                )
    return assembled(task, sources, by_key, method=method, per=per, scalars=scalars, provenance=settings)


def _norm(rows: Tensor, p: float) -> Tensor:
    """Return norms over the last axis whose derivative is zero, not NaN, at zero."""
    if p != 2:
        other: Tensor = torch.linalg.vector_norm(rows, p, dim=-1)
        return other
    squares = rows.square().sum(-1)
    zero = squares == 0
    return torch.where(zero, squares, squares.where(~zero, 1).sqrt())
