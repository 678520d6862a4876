"""`gradreg check`: reports from an experiment's configuration, and the status for scripts."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module

from gradreg.experiments import cli
from gradreg.experiments.check import reports
from gradreg.experiments.hints import null_lists
from gradreg.experiments.run_id import register
from gradreg.experiments.validate import ConfigError


def compose_check(*overrides: str):
    register()
    with initialize_config_module("gradreg.conf", version_base="1.3"):
        return compose("check", overrides=["experiment=smoke", "examples=8", *overrides])


def test_the_arms_of_the_seed():
    few = [f"arms.trainable_base_{kind}_heads.heads.count=6" for kind in ("relu", "softplus")]
    found = reports(compose_check(*few))
    assert set(found) == {
        "penalty / diverse_heads",
        "penalty_without_l1 / diverse_heads",
        "trainable_base_relu_heads / diverse_heads",
        "trainable_base_softplus_heads / diverse_heads",
    }
    assert [name for name, report in found.items() if not report.ok] == ["trainable_base_relu_heads / diverse_heads"]
    blocked = found["trainable_base_relu_heads / diverse_heads"]
    assert blocked.examples == 8
    assert {cause.kind for cause in blocked.causes} == {"ReLU"}
    assert len(blocked.causes) == 6


@pytest.mark.parametrize(
    ("arm", "status"),
    [("trainable_base_relu_heads", 1), ("trainable_base_softplus_heads", 0)],
    ids=["relu", "softplus"],
)
def test_status_and_output(arm, status, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["check", "experiment=smoke", "examples=8", f"arms=[{arm}]", f"arms.{arm}.heads.count=3"]
    if status:
        with pytest.raises(SystemExit) as stop:
            cli.main(given)
        assert stop.value.code == status
    else:
        assert cli.main(given) == 0
    printed = capsys.readouterr().out
    assert f"{arm} / diverse_heads" in printed
    assert ("BLOCKED" in printed) is bool(status)
    assert f"1 checked, {status} blocked" in printed
    assert not list(tmp_path.iterdir())  # nothing is written


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["examples=0"], "examples: 0 is not allowed"),
        (["arms=[no_penalty]"], "nothing to check"),
        (["regularizer=[]"], "nothing to check"),
        (["regularizers.diverse_heads.similarity=doot"], "similarity"),
    ],
)
def test_wrong_configurations_are_refused(overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        reports(compose_check(*overrides))


def test_null_for_a_list_of_options_is_refused():
    assert null_lists(["regularizer=null"], "check") == null_lists(["regularizer=null"], "train") != []
