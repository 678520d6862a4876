"""gradreg summarize: mean and spread over seeds."""

from __future__ import annotations

import pytest

from gradreg.experiments.files import write_json
from gradreg.experiments.summarize import main


def result(seed, penalty, plain, bound):
    def arm(value):
        return {"parts": {"easy": {"test": 0.9}, "hard": {"test": value}}, "id_mean": 0.8, "id_best": 0.95}

    return {
        "seed": seed,
        "parts": ["easy", "hard"],
        "selection": "somewhere",
        "arms": {"no_penalty": arm(plain), "penalty": arm(penalty)},
        "upper_bound": {"easy": bound, "hard": bound},
    }


@pytest.fixture
def runs(tmp_path):
    def write(name, group, seed, *values, done=True):
        folder = tmp_path / "runs" / name
        write_json(
            folder / "meta.json", {"group": group, "seed": seed, "overrides": [f"seed={seed}", "steps=5", "force=true"]}
        )
        write_json(folder / "results.json", result(seed, *values))
        if done:
            write_json(folder / "done.json", {})
        return folder

    return write


def test_mean_and_spread(runs, capsys, monkeypatch, tmp_path):
    runs("a", "one", 0, 0.7, 0.5, 1.0)
    runs("b", "one", 1, 0.9, 0.6, 1.0)
    runs("c", "other", 0, 0.1, 0.1, None)
    runs("d", "one", 2, 0.0, 0.0, 1.0, done=False)
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    text = capsys.readouterr().out
    assert "0.800 ± 0.141" in text
    assert "0.550 ± 0.071" in text
    assert "hard +0.250" in text
    assert "seeds 0, 1." in text
    assert "gradreg train steps=5" in text
    assert text.count("best head when") == 2


def test_single_folder_and_nothing_found(runs, capsys, tmp_path):
    folder = runs("a", "one", 3, 0.7, 0.5, 1.0)
    assert main([str(folder)]) == 0
    assert "seed 3." in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 1
    assert main([str(tmp_path / "absent")]) == 2
    assert "no such folder" in capsys.readouterr().err
