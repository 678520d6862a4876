"""runs/index.csv: which folder is what, since hashes tell nobody."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from gradreg.experiments.files import locked, write_text
from gradreg.experiments.run_directory import RunDirectory

__all__ = ["write_index"]

_COLUMNS = ("id", "status", "seed", "metric", "started", "seconds", "overrides")


def write_index(root: Path) -> Path:
    """Write the index anew from the run folders, so that it is right after crashes and parallel runs too."""
    path = root / "index.csv"
    with locked(root / ".index.lock"):
        table = io.StringIO()
        writer = csv.DictWriter(table, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        rows = []
        for folder in root.iterdir():
            meta = RunDirectory(folder).read("meta.json") if folder.is_dir() else None
            if meta is not None:
                shown = {"id": folder.name, "overrides": " ".join(meta["overrides"])}
                rows.append({**meta, **shown, **_outcome(RunDirectory(folder))})
        for row in sorted(rows, key=lambda row: (row["started"], row["id"])):
            writer.writerow({column: row.get(column, "") for column in _COLUMNS})
        write_text(path, table.getvalue())
    return path


def _outcome(run: RunDirectory) -> dict[str, str]:
    results = run.read("results.json") if run.status == "done" else None
    return {"status": run.status, "metric": f"{results['metric']:.4f}" if results else ""}
