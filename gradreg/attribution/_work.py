"""How the work is split: forward or reverse mode by predicted cost, and chunks by memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gradreg.attribution._path import Path, Units
from gradreg.batch import check_chunk_size
from gradreg.errors import GradregError

__all__ = ["Work", "planned"]

# In forwards of the same rows, measured on transformers: a primal inside forward mode, a tangent, a pullback to activations
_PRIMAL, _TANGENT, _PULLBACK = 1.2, 1.3, 1.1
# What rows in memory may take together, and what a row takes in sizes of the values that are attributed to
_FORWARD_BYTES, _REVERSE_BYTES = 64 * 2**20, 256 * 2**20
_LIVE_FORWARD, _LIVE_REVERSE = 16, 2
# More tangents at a time than this save nothing: the primal is then a thirtieth of the work
_TANGENTS = 32


@dataclass(frozen=True)
class Work:
    """A plan.

    Attributes:
        route: `"forward"` or `"reverse"`.
        bytes: Size of the result, for one head.
        rows: Points of all paths.
        tangents: Tangents of every row in forward mode.
        targets: Targets of every row.
        forward: Predicted cost of forward mode, in forwards of one row.
        reverse: Predicted cost of reverse mode, in forwards of one row.
        row_chunk: Rows at a time.
        inner_chunk: Tangents or targets at a time.
        note: Why the cheaper one is not taken, if so.
    """

    route: str
    bytes: int
    rows: int
    tangents: int
    targets: int
    forward: float
    reverse: float
    row_chunk: int
    inner_chunk: int
    note: str = ""

    @property
    def cost(self) -> float:
        """The predicted cost of the route, in forwards of one row."""
        return self.forward if self.route == "forward" else self.reverse

    def __str__(self) -> str:
        own = f"{self.tangents} tangents" if self.route == "forward" else f"{self.targets} targets"
        other = "reverse" if self.route == "forward" else "forward"
        against = self.reverse if self.route == "forward" else self.forward
        text = (
            f"{self.route} mode: {own} at {self.rows} points for {self.targets} targets, {self.row_chunk} points x "
            f"{self.inner_chunk} at a time, {self.cost / self.rows:.0f} forwards of all points ({other} mode: "
            f"{against / self.rows:.0f}), result {self.bytes / 2**20:.1f} MiB"
        )
        return f"{text}; {self.note}" if self.note else text


def planned(
    path: Path,
    units: Units,
    targets: int,
    *,
    route: str,
    chunk_size: int | None,
    differentiable: bool,
    layers: int,
    note: str = "",
) -> Work:
    """Decide by predicted cost.

    Args:
        path: The points.
        units: What scores are given for.
        targets: Targets per example (and head).
        route: `"auto"`, `"forward"` or `"reverse"`.
        chunk_size: Points times tangents, or times targets, at a time; None: by memory.
        differentiable: Whether the result carries a graph, which only reverse mode can give.
        layers: Modules without children, each of which a graph holds a value of about this size for.
        note: Why the cheaper route is not taken.

    Raises:
        GradregError: If an option has no such value.
    """
    if route not in ("auto", "forward", "reverse"):
        raise GradregError(f"route={route!r}; allowed are 'auto', 'forward', 'reverse'.")
    if route == "forward" and differentiable:
        raise GradregError("differentiable=True needs reverse mode: route='reverse' or 'auto'.")
    check_chunk_size(chunk_size)
    rows, counts = path.examples * path.points, {key: units.tangents(key) for key in path.starts}
    tangents, longest = sum(counts.values()), max(counts.values())
    size = sum(starts[0, 0].numel() * starts.element_size() for starts in path.starts.values())
    element = max(starts.element_size() for starts in path.starts.values())
    pairs = chunk_size or _within(_FORWARD_BYTES, size * _LIVE_FORWARD + targets * element * _LIVE_REVERSE)
    width = max(1, min(longest, pairs, _TANGENTS if chunk_size is None else pairs))
    passes = sum(math.ceil(count / width) for count in counts.values())
    work = Work(
        route="forward",
        bytes=path.examples * targets * element * sum(units.count(key) for key in path.starts),
        rows=rows,
        tangents=tangents,
        targets=targets,
        forward=rows * (_PRIMAL * passes + _TANGENT * tangents),
        reverse=rows * (1 + _PULLBACK * targets),
        row_chunk=max(1, pairs // width if chunk_size is not None else round(pairs / width)),
        inner_chunk=width,
        note=note,
    )
    if route == "forward" or (route == "auto" and not differentiable and work.forward < work.reverse):
        return work
    if differentiable and chunk_size is None:
        return replace(work, route="reverse", row_chunk=rows, inner_chunk=targets)  # the graph holds every row anyway
    pairs = chunk_size or _within(_REVERSE_BYTES, size * _LIVE_REVERSE)
    inner = min(targets, pairs)
    graphs = rows if chunk_size is not None else _within(_REVERSE_BYTES, size * max(_LIVE_FORWARD, layers))
    return replace(work, route="reverse", row_chunk=max(1, min(graphs, pairs // inner)), inner_chunk=inner)


def _within(budget: int, each: int) -> int:
    """Return how many fit into a budget of bytes: at least one, and no more than pays."""
    return max(1, min(4096, budget // max(1, each)))
