"""`gradreg study`: published behavior of a regularizer, reproduced over seeds in a minute or two."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from gradreg.experiments import run_id
from gradreg.experiments.files import write_atomically
from gradreg.experiments.lifecycle import Report, carry_out, checked, under_hydra
from gradreg.experiments.notes import collected_notes
from gradreg.experiments.report import markdown_table, spread, wrap
from gradreg.experiments.rules import study_problems
from gradreg.experiments.run_directory import RunDirectory
from gradreg.experiments.studies._study import Scores, Study

__all__ = ["main", "markdown", "run"]

log = logging.getLogger(__name__)
run_id.register()  # before Hydra composes: the run directory is named by it


def run(config: DictConfig, folder: Path, overrides: Sequence[str] = ()) -> float:
    """Run a study over its seeds, or report what it gave if it is done.

    Args:
        config: The composed configuration.
        folder: The run directory.
        overrides: What was given on the command line, for the index.

    Returns:
        The mean over seeds of the study's metric, for sweepers.

    Raises:
        ConfigError: If the configuration is wrong; nothing is left behind then.
    """
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]  # a mapping, as the file is one
    study: Study = checked(plain, study_problems, folder)["study"]
    directory = RunDirectory(folder)
    return carry_out(directory, config, overrides, {}, lambda: _work(directory, study, plain["seeds"]))


def _work(directory: RunDirectory, study: Study, seeds: Sequence[int]) -> Report:
    """Run all seeds and put them together."""
    by_seed: list[Scores] = []
    details, notes = {}, []
    started = time.process_time()
    for seed in seeds:
        with collected_notes(notes):
            outcome = study.run(seed)
        by_seed.append(outcome.scores)
        details[str(seed)] = outcome.details
        spent = time.process_time() - started
        log.info("seed %d: %s (%.0f s of processor time so far)", seed, _outcome(study, outcome.scores), spent)
    rows = by_seed[0]
    scores = {row: {column: [one[row][column] for one in by_seed] for column in rows[row]} for row in rows}
    row, column = study.metric
    results = {
        "study": type(study).__name__,
        "metric": sum(scores[row][column]) / len(seeds),
        "seeds": list(seeds),
        "scores": scores,
        "reproduced": [study.reproduced(one) for one in by_seed],
        "notes": notes,
        "processor_seconds": round(time.process_time() - started, 1),
        "details": details,
    }

    def draw() -> None:
        figure = study.draw(results)
        write_atomically(directory.path / "plots" / "results.png", lambda path: figure.savefig(path, dpi=150))

    return Report(results, markdown(study, results), draw)


def _outcome(study: Study, scores: Scores) -> str:
    row, column = study.metric
    verdict = "reproduced" if study.reproduced(scores) else "not reproduced"
    return f"{verdict}; {row}, {column}: {scores[row][column]:{study.number}}"


def markdown(study: Study, results: Mapping[str, Any]) -> str:
    """Write the table: mean ± standard deviation over seeds, and on how many seeds the published behavior shows."""
    scores, seeds = results["scores"], results["seeds"]
    columns = list(dict.fromkeys(column for row in scores.values() for column in row))
    rows = [[name, *(spread(row.get(column, []), study.number) for column in columns)] for name, row in scores.items()]
    listed = ", ".join(map(str, seeds))
    measure = f"Mean ± standard deviation over seeds {listed}." if len(seeds) > 1 else f"Seed {listed}."
    lines = [
        *markdown_table(["", *columns], rows),
        "",
        wrap(f"{measure} {study.columns}"),
        "",
        wrap(f"Published: {study.claim}"),
        "",
        wrap(f"Reproduced on {sum(results['reproduced'])} of {len(seeds)} seeds: {study.criterion}."),
        *(["", "Warnings:", *(f"- {note}" for note in results["notes"])] if results["notes"] else []),
        "",
        f"Processor time of all seeds: {results['processor_seconds']:.0f} s.",
    ]
    return "\n".join(lines) + "\n"


@hydra.main(version_base="1.3", config_path="pkg://gradreg.conf", config_name="study")
def main(config: DictConfig) -> float:
    """Run one study."""
    return under_hydra(run, config)


if __name__ == "__main__":
    main()
