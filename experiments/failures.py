"""How a job that fails shows its error and ends the program."""

from __future__ import annotations

import os
import sys
import traceback

import gradreg as gr

__all__ = ["Failed", "JobFailed", "first_line", "show"]


class JobFailed(SystemExit):
    """End of the program because a job failed, after its error was shown; not raised when Hydra refuses overrides."""


class Failed(float):
    """What a failed job of a sweep returns, so that the jobs after it run: NaN, with the error in one line."""

    error: str

    def __new__(cls, error: BaseException) -> Failed:
        """Keep the first line of the error."""
        made = super().__new__(cls, "nan")
        made.error = first_line(error)
        return made


def show(error: BaseException) -> None:
    """Print an error: gradreg's own as their text, for they say what to do; all others with where they came from."""
    if isinstance(error, gr.errors.GradregError) and not os.environ.get("HYDRA_FULL_ERROR"):
        notes = getattr(error, "__notes__", ())
        print("\n".join([str(error), *notes]), file=sys.stderr)
    else:
        traceback.print_exception(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, and of a list of problems the first problem too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = " ".join(lines[:2]) if len(lines) > 1 and lines[1].startswith("1. ") else lines[0]
    return text if isinstance(error, gr.errors.GradregError) else f"{type(error).__name__}: {text}"
