"""Telling what long work will take: a line with the plan and the seconds, then a bar."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from gradreg.attribution._work import Work

__all__ = ["Progress"]

# Seconds from which on work is long
LONG = 10.0


class Progress:
    """A context that measures the first piece of work, and shows the rest where it is long.

    Args:
        what: Name of the method.
        work: The plan.
        show: True: always; False: never; None: if more than ten seconds are predicted.
    """

    def __init__(self, what: str, work: Work, show: bool | None) -> None:
        self.what, self.work, self.show = what, work, show
        self.done, self.pieces = 0.0, 0
        self.since: tuple[float, float] = (time.perf_counter(), 0.0)
        self.bar: Any = None

    def __enter__(self) -> Progress:
        """Start the clock."""
        self.since = (time.perf_counter(), 0.0)
        return self

    def advance(self, cost: float) -> None:
        """Note a piece of work, in forwards of one row."""
        self.done, self.pieces = self.done + cost, self.pieces + 1
        if self.bar is None and self.show is not False and self.pieces <= 2:
            self._announce(first=self.pieces == 1)
        if self.bar is not None:
            self.bar.update(round(self.done) - self.bar.n)

    def _announce(self, first: bool) -> None:
        """Predict from the first piece, and better from the second: the first one loads what torch needs only once."""
        now, (then, done) = time.perf_counter(), self.since
        seconds = (now - then) * self.work.cost / max(self.done - done, 1e-9)
        self.since = (now, self.done)
        if not (self.show or seconds > (10 * LONG if first else LONG)):
            return
        print(f"{self.what}: {self.work}; about {seconds:.0f} s", file=sys.stderr)
        layout = "{l_bar}{bar}| {elapsed}<{remaining}"
        self.bar = tqdm(total=round(self.work.cost), desc=self.what, bar_format=layout, mininterval=0.5)

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
