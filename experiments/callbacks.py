"""After a sweep: the jobs that failed, and the table over seeds."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from gradreg.experiments.failures import Failed, JobFailed
from gradreg.experiments.files import write_text
from gradreg.experiments.summarize import find_groups, summary

__all__ = ["SummarizeSweep", "sweeping_here"]

log = logging.getLogger(__name__)

_process: int | None = None  # the one that runs a sweep and collects its failures


def sweeping_here() -> bool:
    """Tell whether the failures of a sweep are collected in this process."""
    return _process == os.getpid()


class SummarizeSweep(Callback):
    """Print the table over the seeds of a sweep and write it to `summary.md` in the folder of the sweep.

    Jobs that failed are listed, and the program then ends with status 1.
    """

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.failures: list[str] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Take over the failures of jobs in this process."""
        global _process  # the task function cannot reach this object
        _process = os.getpid()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Remember where the job ran. Launchers with processes of their own do not get here."""
        self.folders.append(Path(config.hydra.runtime.output_dir))
        outcome = job_return._return_value
        if isinstance(outcome, Failed):
            self.failures.append(f"{' '.join(config.hydra.overrides.task) or 'no overrides'}: {outcome.error}")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Summarize the jobs of this sweep, or all runs beside them if other processes ran the jobs."""
        root = Path(config.hydra.sweep.dir)
        groups = find_groups(self.folders or [root])
        text = "\n".join(summary(group) for group in groups)
        if text:
            write_text(root / "summary.md", text)
            log.info("\n%s", text)
            log.info("This table is in %s; `gradreg summarize %s` shows all runs there.", root / "summary.md", root)
        if self.failures:
            lines = self.failures if len(self.failures) == 1 else ["", *(f"  {failure}" for failure in self.failures)]
            log.error("%d of %d jobs failed: %s", len(self.failures), len(self.folders), "\n".join(lines).strip(" "))
            raise JobFailed(1)
