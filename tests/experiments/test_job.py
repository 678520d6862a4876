"""One job: what it leaves, what it does when called again, and how it fails."""

from __future__ import annotations

import csv
import json
import logging

import pytest
import torch
from safetensors import safe_open

import gradreg as gr
from gradreg.experiments import job, loop
from gradreg.experiments.files import locked
from gradreg.experiments.labels import arm_label
from gradreg.experiments.run_directory import RunDirectory
from gradreg.experiments.run_id import content_hash

ARMS = {
    "no_penalty",
    "penalty",
    "penalty_without_l1",
    "trainable_base_no_penalty",
    "trainable_base_relu_heads",
    "trainable_base_softplus_heads",
}


def test_files_of_a_finished_run(finished):
    for name in ("config.yaml", "meta.json", "metrics.jsonl", "results.json", "results.md", "done.json"):
        assert (finished.path / name).stat().st_size > 0, name
    assert not list(finished.path.rglob("*.tmp.*"))
    meta = finished.read("meta.json")
    assert meta["seed"] == 0
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["hardware"]["device"]
    assert "${" not in (finished.path / "config.yaml").read_text()
    with (finished.path.parent / "index.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["id"], row["status"]) == (finished.path.name, "done")


def test_plots_are_png(finished):
    files = sorted((finished.path / "plots").iterdir())
    assert [file.name for file in files] == ["curves.png", "heads.png", "results.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000 for file in files)


def test_checkpoints_are_readable_with_step_and_learning_rate(finished):
    folder = finished.path / "arms" / "penalty" / "checkpoints"
    assert [file.name for file in sorted(folder.iterdir())] == [f"step-{step:06d}.safetensors" for step in (2, 4, 6)]
    with safe_open(folder / "step-000004.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "arm": "penalty", "step": "4", "learning_rate": "0.003"}
        assert {name.split(".")[0] for name in file.keys()} == {"base", "heads"}  # noqa: SIM118  # no mapping


def test_results(finished):
    results = finished.read("results.json")
    assert set(results["arms"]) == ARMS
    for arm in results["arms"].values():
        for part in results["parts"]:
            found = arm["parts"][part]
            assert found["test"] == pytest.approx(found["test_of_all_heads"][found["head"]], abs=1e-6)
            assert 0 <= found["id"] <= arm["id_best"] <= 1
    assert all(0 <= bound <= 1 for bound in results["upper_bound"].values())
    table = (finished.path / "results.md").read_text()
    assert all(arm_label(arm) in table for arm in ARMS)
    assert "(oracle" in table


def test_relu_heads_warn_in_the_report_and_softplus_heads_do_not(finished):
    arms = finished.read("results.json")["arms"]
    assert any("ZeroSecondDerivativeWarning" in note for note in arms["trainable_base_relu_heads"]["notes"])
    assert not arms["trainable_base_softplus_heads"]["notes"]
    assert "ZeroSecondDerivativeWarning" in (finished.path / "results.md").read_text()


def test_metrics_have_parts_of_the_loss_and_validation(finished):
    rows = [row for row in finished.metrics.rows() if row["arm"] == "penalty"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "task", "diverse_heads", "diverse_heads/weight", "learning_rate"} <= set(rows[0])
    assert all(row["loss"] == pytest.approx(row["task"] + 0.3 * row["diverse_heads"], rel=1e-5) for row in rows)
    assert [row["step"] for row in rows if "validation/3-8" in row] == [3, 6]


def test_arms_start_equal_and_see_the_same_batches(finished):
    first = {row["arm"]: row for row in finished.metrics.rows() if row["step"] == 1}
    assert first["penalty"]["task"] == pytest.approx(first["no_penalty"]["task"], rel=1e-6)


def test_done_run_is_skipped_unless_forced(started, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    run = started("arms=[no_penalty]", "upper_bound=null")
    before = (run.path / "metrics.jsonl").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", lambda *_: pytest.fail("trained again"))
        started("arms=[no_penalty]", "upper_bound=null")
        assert "Already done" in caplog.text
    started("arms=[no_penalty]", "upper_bound=null", "force=true")
    assert (run.path / "metrics.jsonl").read_text() == before


def test_regularizers_can_be_left_out(started):
    run = started("regularizer=[]", "arms=[penalty]", "upper_bound=null")
    assert "none selected" in (run.path / "results.md").read_text()
    assert set(run.metrics.rows()[0]) == {"arm", "step", "loss", "task", "learning_rate"}


def test_upper_bounds_alone(started):
    run = started("arms=[]")
    assert not run.read("results.json")["arms"]


def test_learning_rate_schedule(started):
    schedule = "{_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 2}"
    run = started("arms=[no_penalty]", "upper_bound=null", f"learning_rate_schedule={schedule}")
    rates = [row["learning_rate"] for row in run.metrics.rows()]
    assert rates == pytest.approx([3e-3, 3e-3, 3e-4, 3e-4, 3e-5, 3e-5])


def test_weight_schedule(started):
    schedule = "{_target_: gradreg.schedules.WarmUp, weight: 8.0, steps: 4}"
    run = started("arms=[penalty]", "upper_bound=null", f"regularizers.diverse_heads.weight={schedule}")
    weights = [row.get("diverse_heads/weight", 0.0) for row in run.metrics.rows()]  # a weight of 0 is not even logged
    assert weights == [0.0, 2.0, 4.0, 6.0, 8.0, 8.0]


def test_failure_leaves_a_traceback_and_is_raised_again(tmp_path, monkeypatch, compose_train, run_train):
    def broken(*_):
        raise RuntimeError("no more memory")

    overrides = ("arms=[no_penalty]", "upper_bound=null")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", broken)
        with pytest.raises(RuntimeError, match="no more memory"):
            run_train(tmp_path, *overrides)
    run = RunDirectory(tmp_path / content_hash(compose_train(*overrides)))
    assert run.status == "failed"
    assert "in broken" in run.read("failed.json")["traceback"]
    assert ",failed," in (tmp_path / "index.csv").read_text()
    run_train(tmp_path, *overrides)
    assert run.status == "done"


def test_nan_in_the_loss_names_step_and_part_and_saves_nothing_broken(tmp_path, monkeypatch, compose_train, run_train):
    overrides = ("arms=[no_penalty]", "upper_bound=null", "checkpoint_every=3")
    take_step = loop.take_step

    def poisoned(arm, step, config):
        if step == 4:
            arm.train.inputs.fill_(torch.nan)
        return take_step(arm, step, config)

    monkeypatch.setattr(loop, "take_step", poisoned)
    with pytest.raises(gr.errors.NonFiniteLossError, match="task") as caught:
        run_train(tmp_path, *overrides)
    assert "4" in str(caught.value)
    run = RunDirectory(tmp_path / content_hash(compose_train(*overrides)))
    assert "no_penalty" in run.read("failed.json")["traceback"]
    assert [file.name for file in (run.path / "arms" / "no_penalty" / "checkpoints").iterdir()] == [
        "step-000003.safetensors"
    ]
    assert all(json.dumps(row, allow_nan=False) for row in run.metrics.rows())


def test_non_finite_weights_are_not_saved(tmp_path, run_train, monkeypatch):
    take_step = loop.take_step

    def exploding(arm, step, config):
        row = take_step(arm, step, config)
        if step == 3:
            next(arm.model.heads.parameters()).data.fill_(torch.inf)
        return row

    monkeypatch.setattr(loop, "take_step", exploding)
    with pytest.raises(gr.errors.NonFiniteLossError, match="after step 4: 1 weights are NaN or infinite"):
        run_train(tmp_path, "arms=[no_penalty]", "upper_bound=null")
    assert [file.name for file in tmp_path.rglob("*.safetensors")] == ["step-000002.safetensors"]


def test_changed_data_are_refused(tmp_path, arrays, run_train):
    import numpy as np

    file = tmp_path / "my.npz"
    np.savez(file, **arrays)
    overrides = ("data=tensors", f"data.path={file}", "base.components=4", "arms=[no_penalty]", "upper_bound=null")
    run_train(tmp_path / "runs", *overrides)
    np.savez(file, **{**arrays, "train_inputs": arrays["train_inputs"] + 1})
    with pytest.raises(gr.errors.GradregError, match="data changed"):
        run_train(tmp_path / "runs", *overrides)


def test_corrected_data_are_accepted_while_nothing_was_trained(tmp_path, arrays, run_train):
    import numpy as np

    file = tmp_path / "my.npz"
    np.savez(file, **{**arrays, "train_targets": arrays["train_targets"] * 0})
    overrides = ("data=tensors", f"data.path={file}", "base.components=4", "arms=[no_penalty]", "upper_bound=null")
    with pytest.raises(gr.errors.GradregError, match="one class only"):
        run_train(tmp_path / "runs", *overrides)
    np.savez(file, **arrays)
    run = run_train(tmp_path / "runs", *overrides)
    assert run.status == "done"
    assert run.read("meta.json")["data"]


def test_no_arm_and_no_upper_bound_data_is_refused_before_a_folder_exists(tmp_path, arrays, run_train):
    import numpy as np

    np.savez(tmp_path / "my.npz", **arrays)
    with pytest.raises(gr.errors.GradregError, match="arms: nothing to train"):
        run_train(tmp_path / "runs", "data=tensors", f"data.path={tmp_path / 'my.npz'}", "arms=[]")
    assert not (tmp_path / "runs").exists()


def test_empty_columns_and_their_legend_are_left_out(started, arrays, tmp_path):
    import numpy as np

    file = tmp_path / "my.npz"
    np.savez(file, **{name: array for name, array in arrays.items() if "_id_" not in name})
    run = started("data=tensors", f"data.path={file}", "base.components=4", "arms=[penalty]")
    table = (run.path / "results.md").read_text()
    assert "ID" not in table
    assert "upper bound" not in table


def test_too_large_batch_is_refused_before_training(tmp_path, run_train):
    with pytest.raises(gr.errors.GradregError, match="batch_size: 65 is more than the 64"):
        run_train(tmp_path, "batch_size=65")


def test_one_process_per_folder(tmp_path, compose_train):
    config = compose_train()
    folder = tmp_path / content_hash(config)
    with locked(folder / ".lock"), pytest.raises(gr.errors.GradregError, match="Another process"):
        job.run(config, folder)
    assert RunDirectory(folder).status == "new"
