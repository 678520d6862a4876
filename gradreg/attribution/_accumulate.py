"""Weighted sums over the points of a path: by tangents, which serve all targets, or by pullbacks, which serve all units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.attribution._path import Path, Units
from gradreg.attribution._progress import Progress
from gradreg.attribution._work import Work, planned
from gradreg.batch import Batch
from gradreg.engine import directional, draws_random_numbers, gradients, head_count, point_values
from gradreg.errors import AttributionWarning, RouteError, warn
from gradreg.model import check_compatible, unwrap
from gradreg.scalars import AcrossHeads, ScalarFunction, across_heads, bind
from gradreg.wrt import Wrt

__all__ = ["Task", "accumulated"]


@dataclass(frozen=True)
class Task:
    """What is attributed.

    Attributes:
        model: The model.
        batch: The batch.
        of: The scalar, bound to the model.
        wrt: Which points.
        differentiable: Whether results carry a graph.
    """

    model: nn.Module
    batch: Batch
    of: ScalarFunction
    wrt: Wrt | tuple[Wrt, ...]
    differentiable: bool = False

    @classmethod
    def bound(cls, model: nn.Module, batch: Batch, of: ScalarFunction, wrt: Any, differentiable: bool) -> Task:
        """Return the task with a scalar that knows the model; warn if the model draws random numbers."""
        check_compatible(model, differentiable=differentiable)
        inner = unwrap(model)
        if inner.training and draws_random_numbers(model, batch):
            warn(
                "The model is in train mode and draws random numbers (dropout): every point of an attribution is then another "
                "function. Call model.eval() first.",
                AttributionWarning,
            )
        return cls(model, batch, bind(of, inner) if callable(of) else of, wrt, differentiable)

    @property
    def leading(self) -> int:
        """The number of axes of scalars before the targets: examples, and heads where there are any."""
        heads = head_count(unwrap(self.model))
        return 1 if heads is None or isinstance(self.of, AcrossHeads) else 2

    def at(self, values: dict[str, Tensor], examples: Tensor, *, differentiable: bool) -> Tensor:
        """Return the scalars at given values of the points, `[r, (K,) *targets]`."""
        return point_values(
            self.model, self.batch[examples], self.of, self.wrt, at=values, differentiable=differentiable
        )


@dataclass(frozen=True)
class _Some:
    """A part of the targets of a scalar, `[n, stop - start]`."""

    of: ScalarFunction
    start: int
    stop: int

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        values = self.of(outputs, batch)
        return values.reshape(len(values), -1)[:, self.start : self.stop]


def accumulated(
    task: Task,
    path: Path,
    per: str,
    targets: torch.Size,
    *,
    route: str,
    chunk_size: int | None,
    show_progress: bool | None,
    what: str,
    squares: bool = False,
) -> tuple[dict[str, Tensor], Work]:
    """Return `[rules, n, (K,) *targets, units]` per key, and the plan that was followed.

    Args:
        task: What is attributed.
        path: The points.
        per: `"token"` or `"feature"`.
        targets: The axes of targets.
        route: `"auto"`, `"forward"` or `"reverse"`.
        chunk_size: Points times tangents, or times targets, at a time.
        show_progress: Whether to show a bar; None: for long work.
        what: Name of the method.
        squares: Append, as a last rule, the sum of squares under the weights of the first.
    """
    units = Units(path.sources, per)
    count = targets.numel()
    options: dict[str, Any] = {"chunk_size": chunk_size, "differentiable": task.differentiable}
    options["layers"] = sum(not list(module.children()) for module in task.model.modules())
    work = planned(path, units, count, route=route, **options)
    sums: _Sums | None = None
    if work.route == "forward":
        sums = _Sums(path, units, targets, squares, by_tangents=True)
        try:
            with Progress(what, work, show_progress) as progress:
                _forward(task, path, units, work, sums, progress)
        except RouteError as refusal:
            if route == "forward":
                raise
            work = planned(path, units, count, route="reverse", note=f"forward mode: {refusal}", **options)
            sums = None
    if sums is None:
        sums = _Sums(path, units, targets, squares, by_tangents=False)
        with Progress(what, work, show_progress) as progress:
            _reverse(task, path, units, work, sums, progress)
    return sums.results(), work


class _Sums:
    """Sums over the points of every example, rule by rule, for all targets; a plain sum, so that chunks do not matter."""

    def __init__(self, path: Path, units: Units, targets: torch.Size, squares: bool, *, by_tangents: bool) -> None:
        self.path, self.units, self.targets = path, units, targets
        self.squares, self.by_tangents = squares, by_tangents
        self.sums: dict[str, Tensor] = {}

    def add(self, key: str, examples: Tensor, points: Tensor, scores: Tensor, first: int, unit: int) -> None:
        """Add scores `[r, (K,) some targets, some units]` that begin at a target and a unit."""
        weights = self.path.weights[:, points].to(scores)
        weights = weights.reshape(*weights.shape, *[1] * (scores.dim() - 1))
        parts = weights * scores
        if self.squares:
            parts = torch.cat([parts, weights[:1] * scores.square()])
        if key not in self.sums:
            width = self.units.tangents(key) if self.by_tangents else self.units.count(key)
            shape = (len(parts), self.path.examples, *scores.shape[1:-2], self.targets.numel(), width)
            wide = torch.promote_types(scores.dtype, torch.float32)  # sums of many are not kept in low precision
            self.sums[key] = torch.zeros(shape, dtype=wide, device=scores.device)
        total = self.sums[key]
        if scores.requires_grad:  # out of place, and so over all targets and units
            after = total.shape[-1] - unit - scores.shape[-1], total.shape[-2] - first - scores.shape[-2]
            parts = F.pad(parts, (unit, after[0], first, after[1]))
            self.sums[key] = total.index_add(1, examples, parts.to(total))
            return
        place = total[..., first : first + scores.shape[-2], unit : unit + scores.shape[-1]]
        place.index_add_(1, examples, parts.to(total))

    def results(self) -> dict[str, Tensor]:
        """Return what was summed, with the axes of targets and units."""
        found = {}
        for key, total in self.sums.items():
            scores = self.units.placed(key, total) if self.by_tangents else total
            scores = scores.unflatten(-2, self.targets) if self.targets else scores.squeeze(-2)
            found[key] = self.units.shaped(key, scores)
        return found


def _forward(task: Task, path: Path, units: Units, work: Work, sums: _Sums, progress: Progress) -> None:
    for start in range(0, work.rows, work.row_chunk):
        examples, points = path.rows(start, start + work.row_chunk)
        values, batch = path.values(examples, points), task.batch[examples]
        for key in path.starts:
            moved = path.moved(key, examples, points)
            count = units.tangents(key, examples)
            for first in range(0, count, work.inner_chunk):
                last = min(first + work.inner_chunk, count)
                directions = units.directions(key, moved, examples, first, last)
                found = directional(task.model, batch, task.of, task.wrt, {key: directions}, at=values, route="forward")
                flat = found.reshape(*found.shape[: task.leading], -1, last - first)
                sums.add(key, examples, points, flat, 0, first)
                progress.advance(len(examples) * work.forward / work.rows * (last - first) / max(work.tangents, 1))


def _reverse(task: Task, path: Path, units: Units, work: Work, sums: _Sums, progress: Progress) -> None:
    for start in range(0, work.rows, work.row_chunk):
        examples, points = path.rows(start, start + work.row_chunk)
        values, batch = path.values(examples, points), task.batch[examples]
        for first in range(0, work.targets, work.inner_chunk):
            last = min(first + work.inner_chunk, work.targets)
            of = task.of if last - first == work.targets else _part(task.of, first, last)
            found = gradients(task.model, batch, of, task.wrt, at=values, differentiable=task.differentiable)
            for key, gradient in found.items():
                moved = path.moved(key, examples, points)
                shape = moved.shape[1:]
                own = gradient.reshape(*gradient.shape[: task.leading], -1, *shape)
                between = own.dim() - moved.dim()
                products = own * moved.reshape(len(moved), *[1] * between, *shape)
                sums.add(key, examples, points, units.summed(key, products), first, 0)
            progress.advance(len(examples) * (1 + work.reverse / work.rows * (last - first) / max(work.targets, 1)))


def _part(of: ScalarFunction, first: int, last: int) -> ScalarFunction:
    some = _Some(of, first, last)
    return across_heads(some) if isinstance(of, AcrossHeads) else some
