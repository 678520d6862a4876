"""Integrated gradients along the straight line from a baseline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.attribution._accumulate import Task, accumulated
from gradreg.attribution._assemble import assembled, change_of, over_units, scalars_of
from gradreg.attribution._baselines import BaselineLike, described, starts_of
from gradreg.attribution._completeness import check_complete
from gradreg.attribution._path import Path
from gradreg.attribution._quadrature import GaussLegendre, LogSpaced, Nodes, as_rule, kronrod, nested_gauss
from gradreg.attribution._result import Attribution
from gradreg.attribution._sources import Sources, chosen_per, read_sources
from gradreg.batch import Batch, as_batch
from gradreg.errors import GradregError
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Wrt

__all__ = ["integrated_gradients"]

# Gauss nodes of the rules that n_steps="auto" tries: 15, 31, ..., 1023 points
_AUTO = (7, 15, 31, 63, 127, 255, 511)


def integrated_gradients(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    *,
    baseline: BaselineLike | None = None,
    n_steps: int | str = 50,
    tolerance: float = 0.01,
    per: str = "auto",
    rule: str | GaussLegendre | LogSpaced = "gauss_legendre",
    differentiable: bool = False,
    chunk_size: int | None = None,
    show_progress: bool | None = None,
    route: str = "auto",
) -> Attribution:
    r"""Integrated gradients, $(x - b) \odot \int_0^1 \nabla f(b + \alpha (x - b))\,d\alpha$, for all targets at once.

    Scores sum to $f(x) - f(b)$ over all features of all keys; `delta` is what is missing. One score per token is the sum over
    its features, a directional derivative: a forward-mode pass with one tangent per source token gives it for every target,
    so that its cost does not grow with the number of targets. Where targets are few, reverse mode is taken (see `route`).
    Several keys (`wrt` a tuple, or both embeddings of an encoder-decoder) move together along one path. Padded positions of
    the attention mask are not moved; they score exactly zero and cost nothing.

    Args:
        model: As in `gradients`. In train mode dropout makes every point another function: call `model.eval()`.
        batch: As in `gradients`.
        of: As in `gradients`; `all_logits()` for every class of every token.
        wrt: `Inputs()`, `Embeddings()`, `Activations(glob)`, `AttentionMaps()`, `Features()`, or a tuple of them.
        baseline: Where the path starts; there is no default. `token_baseline(id)`, `mean_embedding()`, a tensor that
            broadcasts to the value, a number, a mapping from result key to these, or a list of several to average over.
        n_steps: Number of points; `"auto"`: 15, 31, ..., 1023 until `tolerance` is met.
        tolerance: What `"auto"` asks of `error`, and what is warned of in `delta`, relative to the sum of the absolute scores
            of a target.
        per: `"token"`, a score per position along the second axis of the value; `"feature"`, a score for every number, as for
            pixels; `"auto"`: tokens where the value is `[n, L]` or `[n, L, d]`, else features (pictures, attention maps).
        rule: `"gauss_legendre"`, exact for polynomials of degree 2 n_steps - 1; `"log"` for a baseline at a vector of zeros
            that is normalized (see `gradreg.attribution.LogSpaced`).
        differentiable: Keep the graph to all parameters, and to inputs that require grad. Takes reverse mode.
        chunk_size: Points times tangents (times targets, in reverse mode) in memory together; None: by memory.
        show_progress: A line with the plan and the predicted seconds, and a bar; None: for more than ten seconds.
        route: `"auto"`, by predicted cost; `"forward"`; or `"reverse"`. The numbers are the same.

    Returns:
        Scores `[n, *targets, L]` per token, `[n, *targets, *shape]` per feature, with heads `[n, K, ...]`; `change`, `delta` and
        `error`, `[n, *targets]`. `error` is the largest difference of one score to a second rule on the same points, or
        |delta| if that is larger: the interpolatory rule on every other point, with `"auto"` the Gauss rule inside a
        Gauss-Kronrod rule. It estimates the error of the coarser rule, and so is larger than the true one.

    Raises:
        GradregError: If there is no baseline, or something does not fit.

    References:
        Sundararajan, Taly, Yan 2017, arXiv 1703.01365 (the method); Laurie 1997, Math. Comp. 66(219) (nested rules).

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Embedding(9, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        >>> ids = torch.tensor([[1, 5, 0, 8]])
        >>> a = gr.integrated_gradients(net, ids, gr.all_logits(), gr.Embeddings(), baseline=gr.token_baseline(0))
        >>> a.scores.shape, a.target_axes, bool(a.delta.abs().max() < 1e-6)
        (torch.Size([1, 4, 2, 4]), ('token', 'class'), True)
    """
    how = as_rule(rule)
    _check_steps(n_steps, tolerance)
    job = _Job.begun(model, as_batch(batch), of, wrt, baseline, per, differentiable)
    job.options = {"route": route, "chunk_size": chunk_size, "show_progress": show_progress}
    with torch.set_grad_enabled(differentiable):
        nodes = nested_gauss(n_steps, how) if isinstance(n_steps, int) else None
        run = job.along(nodes) if nodes is not None else job.refined(how, tolerance)
        change = change_of(job.task, run.path, job.at_input, chunk_size or max(len(job.task.batch), 64))
        result = assembled(
            job.task,
            job.sources,
            run.by_key,
            method="integrated_gradients",
            per=job.per,
            scalars=job.at_input,
            change=change,
            provenance={
                "baseline": described(baseline),
                "rule": repr(how),
                "steps": run.path.points // job.count,
                "plan": run.plan,
            },
        )
    return check_complete(result, run.error, job.at_input, run.path, model, tolerance, isinstance(how, LogSpaced))


def _check_steps(n_steps: int | str, tolerance: float) -> None:
    if isinstance(n_steps, bool) or not (n_steps == "auto" or (isinstance(n_steps, int) and n_steps >= 1)):
        raise GradregError(f"n_steps={n_steps!r}; allowed are 'auto' and integers from 1.")
    if not isinstance(tolerance, (int, float)) or not tolerance > 0:
        raise GradregError(f"tolerance={tolerance!r}; it is a positive number, relative to the sum of absolute scores.")


@dataclass(frozen=True)
class _Run:
    """Scores along one set of points."""

    path: Path
    by_key: dict[str, Tensor]
    error: Tensor
    plan: str


@dataclass
class _Job:
    """What does not change with the number of points."""

    task: Task
    sources: Sources
    starts: dict[str, Tensor]
    count: int
    per: str
    at_input: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begun(
        cls,
        model: nn.Module,
        batch: Batch,
        of: ScalarFunction,
        wrt: Any,
        baseline: object,
        per: str,
        differentiable: bool,
    ) -> _Job:
        """Read the values and the baseline."""

        def read(other: Batch) -> Sources:
            return read_sources(model, other, wrt, differentiable=differentiable)

        task, sources = Task.bound(model, batch, of, wrt, differentiable), read(batch)
        per = chosen_per(per, sources.values)
        starts, count = starts_of(baseline, model, batch, sources, read)
        with torch.set_grad_enabled(differentiable):
            return cls(task, sources, starts, count, per, scalars_of(task, sources))

    def along(self, nodes: Nodes) -> _Run:
        """Return the scores by all nodes of all baselines, which are weighted alike, and their distance to the nested rule."""
        examples, device = len(self.task.batch), self.at_input.device
        rules = torch.stack([nodes.weights, nodes.weights if nodes.nested is None else nodes.nested])
        path = Path(
            self.sources,
            self.starts,
            nodes.alpha.repeat(self.count).expand(examples, -1).to(device),
            torch.arange(self.count, device=device).repeat_interleave(len(nodes.alpha)),
            (rules.repeat(1, self.count) / self.count).to(device),
        )
        targets = self.at_input.shape[self.task.leading :]
        sums, work = accumulated(self.task, path, self.per, targets, what="integrated_gradients", **self.options)
        apart = {key: (total[0] - total[1]).abs() for key, total in sums.items()}
        by_key = {key: total[0] for key, total in sums.items()}
        return _Run(path, by_key, over_units(apart, self.at_input, "amax"), str(work))

    def refined(self, rule: GaussLegendre | LogSpaced, tolerance: float) -> _Run:
        """Double the number of points until every target's estimate is under the tolerance."""
        for n in _AUTO:
            run = self.along(kronrod(n, rule))
            mass = over_units({key: scores.abs() for key, scores in run.by_key.items()}, self.at_input, "sum")
            if bool((run.error <= tolerance * mass).all()):
                break
        return run
