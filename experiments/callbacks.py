"""After a sweep: the table over seeds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from gradreg.experiments.files import write_text
from gradreg.experiments.summarize import find_groups, summary

__all__ = ["SummarizeSweep"]

log = logging.getLogger(__name__)


class SummarizeSweep(Callback):
    """Print the table over the seeds of a sweep and write it to `summary.md` in the folder of the sweep."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Remember where the job ran. Launchers with processes of their own do not get here."""
        self.folders.append(Path(config.hydra.runtime.output_dir))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Summarize the jobs of this sweep, or all runs beside them if other processes ran the jobs."""
        root = Path(config.hydra.sweep.dir)
        groups = find_groups(self.folders or [root])
        text = "\n".join(summary(group) for group in groups)
        if text:
            write_text(root / "summary.md", text)
            log.info("\n%s", text)
            log.info("This table is in %s; `gradreg summarize %s` shows all runs there.", root / "summary.md", root)
