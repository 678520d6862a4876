"""An interrupted run goes on, and ends with the numbers of an uninterrupted one, to the last bit."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from gradreg.experiments import loop
from gradreg.experiments.run_directory import RunDirectory
from gradreg.experiments.run_id import content_hash

# Adam, a schedule of the rate and one of the weight all have state; five epochs of four batches.
OVERRIDES = (
    "arms=[no_penalty,penalty]",
    "steps=7",
    "learning_rate_schedule={_target_: torch.optim.lr_scheduler.CosineAnnealingLR, _partial_: true, T_max: 7}",
    "regularizers.diverse_heads.weight={_target_: gradreg.schedules.WarmUp, weight: 8.0, steps: 6}",
)


def interrupt_at(monkeypatch, arm_name, at):
    take_step = loop.take_step

    def interrupted(arm, step, config):
        if arm.name == arm_name and step == at:
            raise KeyboardInterrupt
        return take_step(arm, step, config)

    monkeypatch.setattr(loop, "take_step", interrupted)


@pytest.mark.parametrize(("arm", "at"), [("no_penalty", 1), ("no_penalty", 5), ("penalty", 3), ("upper_bound_4-9", 5)])
def test_resumed_equals_uninterrupted(tmp_path, monkeypatch, arm, at, whole_run, compose_train, run_train):
    with monkeypatch.context() as patch:
        interrupt_at(patch, arm, at)
        with pytest.raises(KeyboardInterrupt):
            run_train(tmp_path, *OVERRIDES)
    run = RunDirectory(tmp_path / content_hash(compose_train(*OVERRIDES)))
    assert run.status == "unfinished"
    assert not (run.path / "results.json").exists()
    with run.metrics.path.open("a") as file:
        file.write('{"arm": "penalty", "st')  # a line that was being written when the process died
    taken = []
    take_step = loop.take_step
    monkeypatch.setattr(loop, "take_step", lambda a, step, c: (taken.append((a.name, step)), take_step(a, step, c))[1])
    run_train(tmp_path, *OVERRIDES)
    assert taken[0] == (arm, at - at % 2)  # from the last checkpoint, not from the start
    assert run.metrics.path.read_bytes() == whole_run.metrics.path.read_bytes()
    for file in whole_run.path.rglob("*.safetensors"):
        expected, found = load_file(file), load_file(run.path / file.relative_to(whole_run.path))
        assert all((expected[name] == found[name]).all() for name in expected)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, run_train):
    return run_train(tmp_path_factory.mktemp("whole"), *OVERRIDES)
