"""The figures of docs/tracin.md: only the table that was measured changes, and it says how."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gradreg.experiments.tracin_tables import PAGE, TABLES, main, replaced

TEXT = (Path(__file__).parents[2] / PAGE).read_text()
FOUND = {
    "speed": {
        "small": {
            "gradreg": {"seconds": 0.5, "repeats": 3, "MiB": 9.6, "error": 1.6e-7},
            "peer": {"seconds": 2.0, "repeats": 3, "MiB": 30.2, "error": 2e-7},
            "other": {"absent": "other is not installed"},
            "plain pass": {"seconds": 0.25, "repeats": 3, "MiB": 0.1},
        }
    },
    "index": {
        "build": {
            "rows": 50000,
            "parameters": 999080,
            "numbers": 1360,
            "examples_per_second": 322.1,
            "bytes_per_example": 5448.4,
            "seconds_per_query_of_16": 3.752,
            "MiB_while_building": 2.59,
        },
        "bits": {"killed_and_resumed_equals_one": True, "torchrun_equals_one": False},
    },
    "evaluation": {
        "lds": {
            "subsets": 60,
            "retrainings": 2,
            "tests": 100,
            "methods": {"TracIn": {"lds": 0.9106, "low": 0.8818, "high": 0.9197}},
        },
        "mislabels": {
            "flipped": 144,
            "examples": 1437,
            "methods": {"plain loss": {"auc": 0.992, "low": 0.987, "high": 0.996}},
        },
    },
}
ROWS = {
    "speed": [
        "| small | peer | 2 | 4.0 | 30 | 2e-07 |",
        "| small | other | other is not installed | | | |",
        "| small | plain pass | 0.25 | 0.5 | 0 |  |",
    ],
    "index": [
        "| examples x parameters | 50,000 x 999,080 |",
        "two torchrun workers, against one process | different |",
    ],
    "evaluation": [
        "| LDS, 60 halves, 2 trainings each, 100 tests | | 95 % |",
        "| TracIn | 0.911 | 0.882 to 0.920 |",
        "| plain loss | 0.992 | 0.987 to 0.996 |",
    ],
}


@pytest.mark.parametrize("name", TABLES)
def test_one_table_is_filled(name):
    filled = replaced(TEXT, name, FOUND[name], "2026-01-02", "torch 1.2, here")
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = TEXT.partition(start)
    assert filled.startswith(before + start)
    assert filled.endswith(rest.partition(end)[2])
    assert f"`{TABLES[name][1]}`, 2026-01-02, torch 1.2, here." in filled
    assert all(row in filled for row in ROWS[name])
    assert replaced(filled, name, FOUND[name], "2026-01-02", "torch 1.2, here") == filled


def test_a_page_without_the_place_is_refused():
    with pytest.raises(SystemExit, match="end of speed"):
        replaced("nothing", "speed", FOUND["speed"], "", "")


def test_the_command(tmp_path, monkeypatch, capsys):
    page, measured = tmp_path / "page.md", tmp_path / "speed.json"
    page.write_text(TEXT)
    measured.write_text(json.dumps(FOUND["speed"]))
    monkeypatch.setattr(sys, "argv", ["tables", "--page", str(page), "--speed", str(measured)])
    main()
    text = page.read_text()
    assert "| small | gradreg | 0.5 | 1.0 | 10 | 2e-07 |" in text
    assert "To be filled by" in TEXT or "<!-- index -->" in text
