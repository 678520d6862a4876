"""Folders of runs: gradreg train, and the Trainer of HF transformers by its documented layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.optim import AdamW

import gradreg as gr
from gradreg.errors import CheckpointError
from gradreg.experiments.run_directory import RunDirectory
from tests.tracin.toy import LOSS, TEST, TRAIN, assert_table, toy_model

RATES = {0: 0.1, 1: 0.05}  # by seed of the weights: the two checkpoints of row 21


def write_run(folder: Path, arms: tuple[str, ...] = ("plain",)) -> RunDirectory:
    """A run as `gradreg train` leaves it, written by its own code."""
    run = RunDirectory(folder)
    for arm in arms:
        for seed, rate in RATES.items():
            model = toy_model(seed)
            optimizer = AdamW(model.parameters(), lr=rate)
            run.arm(arm).save(model, {"step": 10 * (seed + 1), "optimizer": optimizer.state_dict()}, rate)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return run


@pytest.mark.parametrize("inside", ["", "arms/plain", "arms/plain/checkpoints"])
def test_a_run_of_gradreg(tmp_path: Path, inside: str) -> None:
    write_run(tmp_path)
    found = gr.read_checkpoints(tmp_path / inside)
    assert [(c.name, c.learning_rate) for c in found] == [
        ("step-000010.safetensors", 0.1),
        ("step-000020.safetensors", 0.05),
    ]
    assert_table(gr.TracIn(toy_model(4), LOSS, found).influence(TRAIN, TEST), -0.048105, 0.746337)


def test_the_optimizer_of_a_run_belongs_to_its_last_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path)
    first, last = gr.read_checkpoints(tmp_path)
    assert last.optimizer_state()["param_groups"][0]["lr"] == 0.05
    with pytest.raises(CheckpointError, match=r"optimizer after step 20, and step-000010\.safetensors is of step 10"):
        first.optimizer_state()


def test_arms_are_asked_for(tmp_path: Path) -> None:
    write_run(tmp_path, ("plain", "diverse"))
    with pytest.raises(CheckpointError, match=r"the run has 2 arms\. Say which: .*'diverse', 'plain'"):
        gr.read_checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="arm='plane' is not there"):
        gr.read_checkpoints(tmp_path, arm="plane")
    assert len(gr.read_checkpoints(tmp_path, arm="plain")) == 2
    with pytest.raises(CheckpointError, match="is no run of gradreg train"):
        gr.read_checkpoints(tmp_path / "arms" / "plain", arm="plain")


def write_trainer(
    folder: Path,
    *,
    log: bool = True,
    optimizer: bool = True,
    scheduler: bool = True,
    sharded: bool = False,
    pickled: bool = False,
) -> None:
    """The output folder of a Trainer: two checkpoints at steps 90 and 100, a log, and what else it leaves."""
    history: list[dict[str, Any]] = [{"loss": 1.0, "learning_rate": 0.3, "step": 50}]
    for seed, step in ((0, 90), (1, 100)):
        here = folder / f"checkpoint-{step}"
        here.mkdir(parents=True)
        history = [
            *history,
            {"loss": 0.9, "learning_rate": RATES[seed], "step": step},
            {"eval_loss": 1.0, "step": step},
        ]
        weights = toy_model(seed).state_dict()
        if sharded:
            write_shards(here, weights, pickled)
        elif pickled:
            torch.save(weights, here / "pytorch_model.bin")
        else:
            save_file(weights, here / "model.safetensors", metadata={"format": "pt"})
        # the scheduler is one step ahead: at the end of a linear decay it says 0
        ahead = RATES[seed] if not log else 0.0
        if optimizer:
            torch.save(AdamW(toy_model(seed).parameters(), lr=ahead).state_dict(), here / "optimizer.pt")
        if scheduler:
            torch.save({"last_epoch": step, "_last_lr": [ahead], "_step_count": step + 1}, here / "scheduler.pt")
        state = {"global_step": step, "log_history": history if log else [], "epoch": 1.0}
        (here / "trainer_state.json").write_text(json.dumps(state))
        torch.save({"cpu": torch.get_rng_state()}, here / "rng_state.pth")
        (here / "training_args.bin").write_bytes(b"a pickle that must not be read")
        (here / "config.json").write_text("{}")
    (folder / "runs").mkdir()
    (folder / "runs" / "events.out.tfevents").write_bytes(b"\x00")
    (folder / "checkpoint-110").mkdir()  # begun, without weights


def write_shards(folder: Path, weights: dict[str, Any], pickled: bool) -> None:
    names, places = list(weights), {}
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    for number, part in enumerate((names[:1], names[1:]), start=1):
        file = f"{stem}-{number:05d}-of-00002.{suffix}"
        save = torch.save if pickled else save_file
        save({name: weights[name] for name in part}, folder / file)
        places.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
def test_a_folder_of_the_trainer(tmp_path: Path, sharded: bool, pickled: bool) -> None:
    write_trainer(tmp_path / "out", sharded=sharded, pickled=pickled)
    found = gr.read_checkpoints(tmp_path / "out")
    assert [checkpoint.name for checkpoint in found] == ["checkpoint-90", "checkpoint-100"]
    assert found[1].learning_rate_origin == "trainer_state.json, logged at step 100"
    assert_table(gr.TracIn(toy_model(4), LOSS, tmp_path / "out").influence(TRAIN, TEST), -0.048105, 0.746337)


@pytest.mark.parametrize(
    ("left", "origin"),
    [({"optimizer": True}, "optimizer.pt"), ({"optimizer": False}, "scheduler.pt")],
    ids=["optimizer", "scheduler"],
)
def test_rates_without_a_log(tmp_path: Path, left: dict[str, bool], origin: str) -> None:
    write_trainer(tmp_path / "out", log=False, **left)
    first, last = gr.read_checkpoints(tmp_path / "out")
    assert (first.learning_rate, last.learning_rate) == (0.1, 0.05)
    assert last.learning_rate_origin == origin


def test_groups_with_different_rates_are_asked_about(tmp_path: Path) -> None:
    write_trainer(tmp_path / "out", log=False)
    path = tmp_path / "out" / "checkpoint-90" / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    state["param_groups"].append({**state["param_groups"][0], "lr": 0.7, "params": []})
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt, whose groups have different ones: \[0\.1, 0\.7\]"):
        gr.Checkpoint(path.parent)
    assert gr.Checkpoint(path.parent, 0.3).learning_rate == 0.3


def test_rates_that_were_logged_earlier_only(tmp_path: Path) -> None:
    write_trainer(tmp_path / "out", optimizer=False, scheduler=False)
    path = tmp_path / "out" / "checkpoint-100" / "trainer_state.json"
    rows = [{"learning_rate": 0.3, "step": 50}, {"learning_rate": 0.2, "step": 99}, {"learning_rate": 0.1, "step": 101}]
    path.write_text(json.dumps({"global_step": 100, "log_history": rows}))
    checkpoint = gr.Checkpoint(tmp_path / "out" / "checkpoint-100")
    assert (checkpoint.learning_rate, checkpoint.learning_rate_origin) == (0.2, "trainer_state.json, logged at step 99")
    path.write_text(json.dumps({"global_step": 100, "log_history": []}))
    with pytest.raises(
        CheckpointError, match=r"looked at the log of trainer_state\.json, optimizer\.pt, scheduler\.pt"
    ):
        gr.Checkpoint(tmp_path / "out" / "checkpoint-100")


def test_a_folder_of_save_pretrained(tmp_path: Path) -> None:
    save_file(toy_model().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="No learning rate is known"):
        gr.read_checkpoints(tmp_path)
    found = gr.TracIn(toy_model(4), LOSS, gr.read_checkpoints(tmp_path, learning_rate=0.1)).influence(TRAIN, TEST)
    assert_table(found, -0.048863, 0.439982)


def test_the_optimizer_of_the_trainer(tmp_path: Path) -> None:
    write_trainer(tmp_path / "out", log=False)
    found = gr.TracIn(toy_model(4), LOSS, tmp_path / "out", update="optimizer").influence(TRAIN, TEST)
    assert found.shape == (4, 11)


def test_folders_that_are_broken_are_named(tmp_path: Path) -> None:
    write_trainer(tmp_path / "out", sharded=True)
    here = tmp_path / "out" / "checkpoint-90"
    index = here / "model.safetensors.index.json"
    shard = here / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    save_file({"2.bias": torch.zeros(3)}, shard)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors lacks '0\.bias'"):
        gr.Checkpoint(here).load()
    shard.write_bytes(content)
    shard.rename(here / "moved")
    with pytest.raises(CheckpointError, match=r"names the shard 'model-00002-of-00002\.safetensors'"):
        gr.Checkpoint(here).load()
    index.write_text(json.dumps({"weight_map": {"0.weight": "../checkpoint-100/model-00001-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match="which is not in its folder"):
        gr.Checkpoint(here).load()
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="is no index of shards"):
        gr.Checkpoint(here).load()
    (here / "trainer_state.json").write_text("{")
    with pytest.raises(CheckpointError, match="is no state of a Trainer"):
        gr.Checkpoint(here)
    with pytest.raises(CheckpointError, match=r"holds no weights; looked for model\.safetensors"):
        gr.Checkpoint(tmp_path / "out" / "checkpoint-110")
    (tmp_path / "out" / "checkpoint-110" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="an adapter without the model"):
        gr.Checkpoint(tmp_path / "out" / "checkpoint-110")
