"""The benchmark of TracIn: its own contestants agree with the truth, absent peers say so."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from gradreg.experiments.benchmarks import tracin
from gradreg.experiments.benchmarks.tracin_contestants import CONTESTANTS, PEERS
from gradreg.experiments.benchmarks.tracin_problems import PROBLEMS, load_problem, truth

OWN = [name for name in CONTESTANTS if not any(name.startswith(word) for word in PEERS)]


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(PROBLEMS, "MLP 64-64-10", replace(PROBLEMS["MLP 64-64-10"], epochs=1))
        whole = load_problem("MLP 64-64-10", folder)
    few = replace(
        whole,
        train=tuple(side[:20] for side in whole.train),
        test=tuple(side[:6] for side in whole.test),
        corner=(6, 20),
        chunk=7,
    )
    expected = truth(few, folder)
    few.model.float()
    return few, expected


@pytest.mark.parametrize("name", OWN)
def test_own_contestants_give_the_truth(problem, name, tmp_path):
    few, expected = problem
    found = CONTESTANTS[name](few, tmp_path).double()
    assert found.shape == expected.shape
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def test_every_peer_is_known():
    assert len(OWN) == 4
    assert len(CONTESTANTS) - len(OWN) == 6
    assert len(PROBLEMS) == 5


def test_absent_peers_and_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    rows = {
        name: tracin.measure_apart(name, "small CNN", tmp_path, 1, 1)
        for name in ("opacus", "dattri-llm", "dattri, exact")
    }
    rows["gradreg"] = {"seconds": 0.5, "MiB": 3.0, "error": 2e-7}
    rows["plain pass"] = {"seconds": 0.25, "MiB": 0.0}
    text = tracin.table({"small CNN": rows})
    assert "dattri_llm is not installed" in text
    assert "dattri is not installed" in text
    assert "opacus is not installed" in text
    assert text.splitlines()[-1].split() == ["plain", "pass", "0.250", "0.50", "0", "-"]
