"""Put measured figures into docs/tracin.md, from the JSON files of the benchmarks.

    python -m gradreg.experiments.benchmarks.tracin --json tracin.json
    python -m gradreg.experiments.benchmarks.index --json index.json
    gradreg evaluate-tracin --out evaluation.json
    python -m gradreg.experiments.tracin_tables --speed tracin.json --index index.json --evaluation evaluation.json

Each table stands between two comments, `<!-- speed -->` and `<!-- end of speed -->`, and carries its command, the date of the
JSON file, the version of torch and the machine of this call. Tables without a file stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

__all__ = ["TABLES", "main", "replaced"]

PAGE = Path("docs/tracin.md")
Found = Mapping[str, Any]


def speed(found: Found) -> str:
    """Return seconds, memory and error of all contestants, a row per problem and contestant."""
    rows = ["| problem | who | seconds | times gradreg | MiB | relative error |", "|---|---|---|---|---|---|"]
    for problem, contestants in found.items():
        own = contestants.get("gradreg", {}).get("seconds")
        for name, row in contestants.items():
            if "absent" in row:
                rows.append(f"| {problem} | {name} | {row['absent']} | | | |")
                continue
            times = f"{row['seconds'] / own:.1f}" if own else ""
            error = f"{row['error']:.0e}" if row.get("error") is not None else ""
            rows.append(f"| {problem} | {name} | {row['seconds']:.3g} | {times} | {row['MiB']:.0f} | {error} |")
    return "\n".join(rows)


def index(found: Found) -> str:
    """Return what building and asking an index costs, and which ways of building gave equal bits."""
    build, bits = found["build"], found.get("bits")
    rows = [
        ("examples x parameters", f"{build['rows']:,} x {build['parameters']:,}"),
        ("numbers per example, projected", f"{build['numbers']:,}"),
        ("examples per second", f"{build['examples_per_second']:,.0f}"),
        ("bytes per example", f"{build['bytes_per_example']:,.0f}"),
        ("seconds for a query of 16 tests", f"{build['seconds_per_query_of_16']:.2f}"),
        ("growth of memory while building, MiB", f"{build['MiB_while_building']:.1f}"),
    ]
    if bits:
        words = {True: "equal, bit for bit", False: "different"}
        rows += [
            ("killed and resumed, against one process", words[bits["killed_and_resumed_equals_one"]]),
            ("two torchrun workers, against one process", words[bits["torchrun_equals_one"]]),
        ]
    return "\n".join(["| index | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def evaluation(found: Found) -> str:
    """Return LDS and detection of flipped labels, each with its interval."""
    parts = []
    if "lds" in found:
        lds = found["lds"]
        title = f"LDS, {lds['subsets']} halves, {lds['retrainings']} trainings each, {lds['tests']} tests"
        parts.append(_intervals(title, lds["methods"], "lds"))
    if "mislabels" in found:
        flipped = found["mislabels"]
        title = f"AUC of {flipped['flipped']} flipped labels among {flipped['examples']}"
        parts.append(_intervals(title, flipped["methods"], "auc"))
    return "\n\n".join(parts)


def _intervals(title: str, methods: Found, key: str) -> str:
    rows = [f"| {name} | {row[key]:.3f} | {row['low']:.3f} to {row['high']:.3f} |" for name, row in methods.items()]
    return "\n".join([f"| {title} | | 95 % |", "|---|---|---|", *rows])


TABLES: dict[str, tuple[Callable[[Found], str], str]] = {
    "speed": (speed, "python -m gradreg.experiments.benchmarks.tracin"),
    "index": (index, "python -m gradreg.experiments.benchmarks.index"),
    "evaluation": (evaluation, "gradreg evaluate-tracin"),
}
"""From the name of a table to what writes it and the command that measures it."""


def replaced(text: str, name: str, found: Found, when: str, where: str) -> str:
    """Return the page with one table filled.

    Args:
        text: The page.
        name: Of the table.
        found: What the command measured.
        when: The date.
        where: Version and machine.

    Returns:
        The page; all else is as it was.

    Raises:
        SystemExit: If the page has no place for the table.
    """
    write, command = TABLES[name]
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise SystemExit(f"The page needs {start} and {end}, once each.")
    body = f"{start}\n`{command}`, {when}, {where}.\n\n{write(found)}\n{end}"
    return re.sub(f"{start}.*?{end}", lambda _: body, text, flags=re.DOTALL)


def main() -> None:
    """Fill the tables that are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (_, command) in TABLES.items():
        parser.add_argument(f"--{name}", type=Path, metavar="JSON", help=f"what `{command}` wrote")
    cores = f"one thread of a machine with {os.cpu_count()} {platform.machine()} cores"
    parser.add_argument("--where", default=f"torch {torch.__version__}, {cores}", help="version and machine")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    text = arguments.page.read_text()
    for name in TABLES:
        path: Path | None = getattr(arguments, name)
        if path is not None:
            when = date.fromtimestamp(path.stat().st_mtime).isoformat()
            text = replaced(text, name, json.loads(path.read_text()), when, arguments.where)
            print(f"{name}: from {path}")
    arguments.page.write_text(text)


if __name__ == "__main__":
    main()
