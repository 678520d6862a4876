"""`gradreg summarize`: mean and spread over seeds of finished runs that differ in nothing else."""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradreg.experiments.labels import arm_label
from gradreg.experiments.report import markdown_table, spread, wrap
from gradreg.experiments.run_directory import RunDirectory
from gradreg.experiments.run_id import IGNORED

__all__ = ["Group", "find_groups", "main", "summary"]


@dataclass
class Group:
    """Finished runs of one configuration, by seed.

    Args:
        overrides: Command line of one of them, without the seed.
        results: Their results, in the order of the seeds.
    """

    overrides: str
    results: list[dict[str, Any]]


def find_groups(paths: Iterable[Path]) -> list[Group]:
    """Collect finished runs; a path is a run folder or a folder of such."""
    groups: dict[str, dict[int, tuple[str, dict[str, Any]]]] = {}
    hidden = {"seed", *IGNORED}  # they do not tell groups apart
    for path in paths:
        children = [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
        for folder in sorted({path, *children}):
            run = RunDirectory(folder)
            meta = run.read("meta.json") if run.status == "done" else None
            if meta is not None and "group" in meta:  # studies have their own tables over seeds
                shown = shlex.join(word for word in meta["overrides"] if word.split("=", 1)[0] not in hidden)
                groups.setdefault(meta["group"], {})[meta["seed"]] = (shown, run.read("results.json"))
    return [
        Group(next(iter(seeds.values()))[0], [seeds[seed][1] for seed in sorted(seeds)]) for seeds in groups.values()
    ]


def summary(group: Group) -> str:
    """Write the table of a group in Markdown: mean ± standard deviation over seeds."""
    parts = group.results[0]["parts"]
    shared = [arm for arm in group.results[0]["arms"] if all(arm in result["arms"] for result in group.results)]
    rows = []
    for arm in shared:
        found = [result["arms"][arm] for result in group.results]
        columns = [[one["parts"][part]["test"] for one in found] for part in parts]
        rows.append(
            [
                arm_label(arm),
                *(map(spread, [*columns, [one["id_mean"] for one in found], [one["id_best"] for one in found]])),
            ]
        )
    bounds = [[result["upper_bound"][part] for result in group.results] for part in parts]
    if any(value is not None for column in bounds for value in column):
        rows.append(["upper bound", *map(spread, bounds), "", ""])
    seeds = ", ".join(str(result["seed"]) for result in group.results)
    many = len(group.results) > 1
    lines = [
        *markdown_table(["best head when only this part is predictive", *parts, "ID mean", "ID best"], rows),
        "",
        wrap(
            f"Test accuracy, {'mean ± standard deviation over seeds' if many else 'seed'} {seeds}. "
            "The head for each part is chosen on validation data in which only that part is predictive (oracle "
            f"selection; here: {group.results[0]['selection']})."
        ),
    ]
    lift = _lift(group, parts)
    return "\n".join([f"gradreg train {group.overrides}".rstrip(), "", *lines, *([lift] if lift else [])]) + "\n"


def _lift(group: Group, parts: Sequence[str]) -> str | None:
    if not all({"penalty", "no_penalty"} <= set(result["arms"]) for result in group.results):
        return None
    lifts = {
        part: [
            r["arms"]["penalty"]["parts"][part]["test"] - r["arms"]["no_penalty"]["parts"][part]["test"]
            for r in group.results
        ]
        for part in parts
    }
    return (
        "Penalty minus no penalty: " + ", ".join(f"{part} {statistics.mean(v):+.3f}" for part, v in lifts.items()) + "."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one table per configuration found."""
    parser = argparse.ArgumentParser("gradreg summarize", description=__doc__.split(": ", 1)[1])
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[Path("runs")], help="run folders, or folders of them (runs)"
    )
    given = parser.parse_args(arguments)
    absent = [str(path) for path in given.paths if not path.is_dir()]
    if absent:
        print(f"gradreg summarize: no such folder: {', '.join(absent)}.", file=sys.stderr)
        return 2
    groups = find_groups(given.paths)
    if not groups:
        print(f"No finished run in {', '.join(map(str, given.paths))}; `gradreg train` makes one.", file=sys.stderr)
        return 1
    print("\n".join(summary(group) for group in groups), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
