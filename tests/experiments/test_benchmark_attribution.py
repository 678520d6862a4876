"""The benchmark of attributions runs, and compares the targets that it says."""

from __future__ import annotations

import pytest

from gradreg.experiments.benchmarks import attribution


def test_it_runs_on_a_tiny_case(capsys: pytest.CaptureFixture[str]) -> None:
    attribution.main(["--cases", "tiny", "--repeats", "1", "--classes", "3", "5", "--no-captum", "--no-memory"])
    told = capsys.readouterr().out
    assert "12 targets" in told
    assert "forward mode: 4 tangents" in told
    assert "C = 5" in told


def test_samples_of_targets_are_spread() -> None:
    large = attribution.CASES["large"]
    assert len(large.targets) == 18
    assert len({token for token, _ in large.targets}) == 18
    assert {label for _, label in large.targets} == set(range(9))
    assert len(attribution.CASES["small"].targets) == 32 * 19
