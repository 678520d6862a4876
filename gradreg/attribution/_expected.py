"""Expected gradients: integrated gradients averaged over references, by sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.attribution._accumulate import Task, accumulated
from gradreg.attribution._assemble import assembled, change_of, over_units, scalars_of
from gradreg.attribution._baselines import BaselineLike, check_finite, described, starts_of
from gradreg.attribution._draws import check_samples, generator_of
from gradreg.attribution._path import Path
from gradreg.attribution._result import Attribution
from gradreg.attribution._sources import Sources, chosen_per, read_sources
from gradreg.batch import Batch, as_batch
from gradreg.errors import GradregError
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Wrt

__all__ = ["expected_gradients"]


def expected_gradients(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    *,
    references: Tensor | Mapping[str, Tensor] | list[BaselineLike],
    n_samples: int = 100,
    per: str = "auto",
    generator: torch.Generator | None = None,
    differentiable: bool = False,
    chunk_size: int | None = None,
    show_progress: bool | None = None,
    route: str = "auto",
) -> Attribution:
    r"""Expected gradients, $\mathbb{E}_{b, \alpha}[(x - b) \odot \nabla f(b + \alpha (x - b))]$ with b drawn from references.

    Alpha is uniform on (0, 1); every example draws its own references. For few references, `integrated_gradients` with a list
    of baselines has no noise.

    Args:
        model: As in `integrated_gradients`.
        batch: As in `integrated_gradients`.
        of: As in `integrated_gradients`.
        wrt: As in `integrated_gradients`.
        references: A background set `[R, *shape]`, a mapping from result key to such sets, whose rows belong together; or a
            list of baselines as in `integrated_gradients`.
        n_samples: Draws of reference and alpha per example.
        per: As in `integrated_gradients`.
        generator: Random numbers; None: one of its own with seed 0. The global streams are left alone.
        differentiable: As in `integrated_gradients`.
        chunk_size: As in `integrated_gradients`.
        show_progress: As in `integrated_gradients`.
        route: As in `integrated_gradients`.

    Returns:
        As `integrated_gradients`; `change` is f(x) minus the mean of f at the drawn references, and `error` the largest
        standard error of a score.

    Raises:
        GradregError: If references do not fit.

    References:
        Erion, Janizek, Sturmfels, Lundberg, Lee 2021, arXiv 1906.10670, section 2.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Linear(3, 2)
        >>> x, background = torch.ones(4, 3), torch.zeros(10, 3)
        >>> a = gr.expected_gradients(net, x, gr.all_logits(), gr.Inputs(), references=background, per="feature")
        >>> torch.allclose(a.scores[0], net.weight)
        True
    """
    check_samples(n_samples, 2)
    generator = generator_of(generator)
    batch = as_batch(batch)
    task = Task.bound(model, batch, of, wrt, differentiable)

    def read(other: Batch) -> Sources:
        return read_sources(model, other, wrt, differentiable=differentiable)

    sources = read(batch)
    per = chosen_per(per, sources.values)
    n = len(batch)
    if isinstance(references, list):
        pool, count = starts_of(references, model, batch, sources, read)
        chosen = torch.randint(count, (n_samples, n), generator=generator, device=generator.device)
        starts = {key: own[chosen.to(own.device), torch.arange(n, device=own.device)] for key, own in pool.items()}
    else:
        sets = _sets(references, sources)
        count = len(next(iter(sets.values())))
        chosen = torch.randint(count, (n_samples, n), generator=generator, device=generator.device)
        starts = {key: sources.where_real(key, own[chosen.to(own.device)]) for key, own in sets.items()}
    alpha = torch.rand(n, n_samples, generator=generator, device=generator.device, dtype=torch.float64)
    device = next(iter(sources.values.values())).device
    path = Path(
        sources,
        starts,
        alpha.to(device),
        torch.arange(n_samples, device=device),
        torch.full((1, n_samples), 1 / n_samples, dtype=torch.float64, device=device),
    )
    with torch.set_grad_enabled(differentiable):
        at_input = scalars_of(task, sources)
        sums, work = accumulated(
            task,
            path,
            per,
            at_input.shape[task.leading :],
            route=route,
            chunk_size=chunk_size,
            show_progress=show_progress,
            what="expected_gradients",
            squares=True,
        )
        spread = {key: (total[1] - total[0].square()).detach().clamp(min=0) for key, total in sums.items()}
        return assembled(
            task,
            sources,
            {key: total[0] for key, total in sums.items()},
            method="expected_gradients",
            per=per,
            scalars=at_input,
            change=change_of(task, path, at_input, chunk_size or max(n, 64)),
            error=(over_units(spread, at_input, "amax") / (n_samples - 1)).sqrt(),
            provenance={"references": described(references), "samples": n_samples, "plan": str(work)},
        )


def _sets(references: Tensor | Mapping[str, Tensor], sources: Sources) -> dict[str, Tensor]:
    given = dict(references) if isinstance(references, Mapping) else dict.fromkeys(sources.values, references)
    if given.keys() != sources.values.keys() or (isinstance(references, Tensor) and len(given) > 1):
        raise GradregError(
            f"references are needed for the keys {', '.join(map(repr, sources.values))}: give a mapping."
        )
    for key, own in given.items():
        value = sources.values[key]
        if (
            not isinstance(own, Tensor)
            or own.shape[1:] != value.shape[1:]
            or not len(own)
            or not own.is_floating_point()
        ):
            found = tuple(own.shape) if isinstance(own, Tensor) else type(own).__name__
            raise GradregError(
                f"The references of {key!r} are {found}; expected [R, {', '.join(map(str, value.shape[1:]))}]."
            )
        check_finite(f"The references of {key!r}", own)
    if len({len(own) for own in given.values()}) > 1:
        raise GradregError("References of several keys belong together row by row and must be equally many.")
    return {key: own.to(sources.values[key]) for key, own in given.items()}
