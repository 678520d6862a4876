"""docs/transformers.md: a row for every family, as measured, for both versions of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradreg.experiments.transformers.families import FAMILIES
from gradreg.experiments.transformers.table import BEGIN, END, NUMBERS, PAGE, table

ROOT = Path(__file__).parents[2]
NUMBERS_FOUND = json.loads((ROOT / NUMBERS).read_text())


def test_the_page_holds_the_table_of_the_numbers() -> None:
    text = (ROOT / PAGE).read_text()
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == table(NUMBERS_FOUND)


def test_both_versions_and_all_families_are_there() -> None:
    assert {version.partition(".")[0] for version in NUMBERS_FOUND} == {"4", "5"}
    for rows in NUMBERS_FOUND.values():
        assert {name: row["class"] for name, row in rows.items()} == {each.name: each.model for each in FAMILIES}


@pytest.mark.parametrize("version", NUMBERS_FOUND)
def test_what_was_measured_is_within_bounds(version: str) -> None:
    for family in FAMILIES:
        row, bound = NUMBERS_FOUND[version][family.name], 1e-10 if family.exact else 1e-5
        assert row["maps"] == family.maps
        assert row["factors"] == 1.0
        for name in ("embeddings", "maps", "factors", "differentiable"):
            assert (row[f"error, {name}"] or 0.0) <= bound, (family.name, name)
