"""Warnings that belong into the report, not only on the screen."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import gradreg as gr

__all__ = ["collected_notes"]

log = logging.getLogger(__name__)


@contextlib.contextmanager
def collected_notes(notes: list[str]) -> Iterator[None]:
    """Append gradreg's own warnings to `notes`, each once, and log them; all other warnings take their usual way."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", gr.errors.GradregWarning)
        show = warnings.showwarning

        def collect(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
            if not issubclass(category, gr.errors.GradregWarning):
                show(message, category, *rest, **options)
                return
            note = f"{category.__name__}: {message}"
            if note not in notes:
                notes.append(note)
                log.warning(note)

        warnings.showwarning = collect
        yield
