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
        self.done, self.began = 0.0, time.perf_counter()
        self.seconds: float | None = None
        self.bar: Any = None

    def __enter__(self) -> Progress:
        """Start the clock."""
        self.began = time.perf_counter()
        return self

    def advance(self, cost: float) -> None:
        """Note a piece of work, in forwards of one row."""
        self.done += cost
        if self.seconds is None:
            self.seconds = (time.perf_counter() - self.began) * self.work.cost / max(self.done, 1e-9)
            if self.show or (self.show is None and self.seconds > LONG):
                print(f"{self.what}: {self.work}; about {self.seconds:.0f} s", file=sys.stderr)
                self.bar = tqdm(
                    total=round(self.work.cost), desc=self.what, bar_format="{l_bar}{bar}| {elapsed}<{remaining}"
                )
        if self.bar is not None:
            self.bar.update(round(self.done) - self.bar.n)

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
