"""`gradreg query`: the proponents and opponents of test examples, from an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from gradreg.errors import GradregError, closest
from gradreg.experiments._instantiate import build
from gradreg.experiments.attribution.answers import answer_page, as_csv, as_rows, as_table
from gradreg.experiments.attribution.index import CONFIG
from gradreg.experiments.attribution.prepare import Prepared, prepare
from gradreg.experiments.attribution.program import run_job
from gradreg.experiments.data import IN_DISTRIBUTION
from gradreg.experiments.files import write_json, write_text
from gradreg.tracin import Rows, TopK, read_rows
from gradreg.tracin.index import ChosenRows, build_index

__all__ = ["main"]


def _problems(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if not (Path(config["index"]) / CONFIG).is_file():
        problems.append(f"index: {config['index']} holds no finished index of `gradreg index` (there is no {CONFIG}).")
    for key in ("k", "count"):
        value = config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{key}: {value!r} is not allowed; allowed are the integers 1, 2, 3, ...")
    return problems


def _work(config: dict[str, Any]) -> None:
    folder = Path(config["index"])
    stored: Any = OmegaConf.to_container(OmegaConf.load(folder / CONFIG), resolve=True)
    given = {key: config[key] for key in ("test", "test_of", "device", "memory", "progress")}
    prepared = prepare({**stored, **given})
    spec, trains = prepared.tracin.spec, read_rows(prepared.train, prepared.collate)
    index = build_index(spec, trains, folder, memory=prepared.tracin.memory, collate=prepared.collate, only_open=True)
    tests, positions = _tests(prepared, config)
    chosen = ChosenRows(tests, positions)
    top = index.top_k(chosen, min(config["k"], len(index)))
    rows = as_rows(top, [tests.identity(position) for position in positions], trains, tests, positions)
    out = Path(config["out"])
    facts = {
        "index": str(folder),
        "examples": len(index),
        "checkpoints": len(spec.checkpoints),
        "tests": len(positions),
    }
    write_json(out / "answers.json", {**facts, "dominance": str(top.dominance), "answers": rows})
    write_text(out / "answers.csv", as_csv(rows))
    print(as_table(rows))
    print(f"\n{top.dominance}")
    if config["page"]:
        write_text(out / "answers.html", _page(config, prepared, top, tests, positions, trains, facts))
    print(f"Written to {out}: answers.json, answers.csv{', answers.html' if config['page'] else ''}")


def _tests(prepared: Prepared, config: Mapping[str, Any]) -> tuple[Rows, list[int]]:
    name = config["test"]
    if isinstance(name, Mapping):
        name = "test"
    elif name is None:
        name = IN_DISTRIBUTION if IN_DISTRIBUTION in prepared.tests else next(iter(prepared.tests), None)
    if name not in prepared.tests:
        known = f"Closest: {closest(str(name), prepared.tests)}" if prepared.tests else "Give test={_target_: ...}"
        raise GradregError(f"test: there is no test set {name!r}. {known}.")
    rows = read_rows(prepared.tests[name], prepared.collate)
    positions = list(range(min(config["count"], len(rows)))) if config["rows"] is None else list(config["rows"])
    outside = [row for row in positions if not isinstance(row, int) or not 0 <= row < len(rows)]
    if outside:
        raise GradregError(f"rows: {outside[0]!r} is no row of the test set; allowed are 0 to {len(rows) - 1}.")
    return rows, positions


def _page(
    config: Mapping[str, Any],
    prepared: Prepared,
    top: TopK,
    tests: Rows,
    positions: list[int],
    trains: Rows,
    facts: Mapping[str, Any],
) -> str:
    return answer_page(
        "Proponents and opponents",
        top,
        tests,
        positions,
        trains,
        tracin=prepared.tracin,
        image_shape=config["image_shape"],
        decode=build(config["decode"]) if config["decode"] is not None else None,
        facts=[(name, str(value)) for name, value in facts.items()],
    )


@hydra.main(version_base="1.3", config_path="pkg://gradreg.conf", config_name="query")
def main(config: DictConfig) -> float:
    """Answer a query."""
    return run_job(config, _problems, _work)


if __name__ == "__main__":
    main()
