"""Checkpoints as training programs write them: files, dictionaries, Lightning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import SGD, Adam

import gradreg as gr
from gradreg.errors import AttributionWarning, CheckpointError
from tests.tracin.toy import LOSS, TEST, TRAIN, Tied, assert_scores, assert_table, brute, made, toy_model

WEIGHTS = toy_model().state_dict()


def scores(checkpoints: Any, model: nn.Module | None = None) -> torch.Tensor:
    return gr.TracIn(model or toy_model(5), LOSS, checkpoints).influence(TRAIN, TEST)


def adam_state(rate: float) -> dict[str, Any]:
    return Adam(toy_model().parameters(), lr=rate).state_dict()


DICTIONARIES: dict[str, tuple[dict[str, Any], str]] = {
    "flat": ({**WEIGHTS, "learning_rate": 0.1}, "key 'learning_rate'"),
    "flat with a tensor": ({**WEIGHTS, "learning_rate": torch.tensor(0.1)}, "key 'learning_rate'"),
    "flat lr": ({**WEIGHTS, "lr": 0.1, "epoch": 3}, "key 'lr'"),
    "model_state_dict": ({"model_state_dict": WEIGHTS, "lr": 0.1, "epoch": 3}, "key 'lr'"),
    "with an optimizer": (
        {"model": WEIGHTS, "optimizer": adam_state(0.1)},
        "the optimizer's parameter groups",
    ),
    "rate beside an optimizer": (
        {"state_dict": WEIGHTS, "learning_rate": 0.1, "optimizer_state_dict": adam_state(0.7)},
        "key 'learning_rate'",
    ),
}


@pytest.mark.parametrize("name", DICTIONARIES)
@pytest.mark.parametrize("form", ["file", "mapping", "old file"])
def test_dictionaries(name: str, form: str, tmp_path: Path) -> None:
    content, origin = DICTIONARIES[name]
    source: Any = content
    if form != "mapping":
        source = tmp_path / "model.pt"
        torch.save(content, source, _use_new_zipfile_serialization=form == "file")
    checkpoint = gr.Checkpoint(source)
    assert abs(checkpoint.learning_rate - 0.1) < 1e-7
    assert checkpoint.learning_rate_origin == origin
    assert_scores(scores(checkpoint), 0.1 * brute(toy_model()), 1e-6)
    assert gr.Checkpoint(source, learning_rate=0.5).learning_rate == 0.5


def lightning(state: dict[str, Any], optimizers: list[Any]) -> dict[str, Any]:
    """The layout of Lightning 2: weights under the attribute of the LightningModule, beside those of a metric."""
    return {
        "epoch": 1,
        "global_step": 20,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {**{f"model.{name}": value for name, value in state.items()}, "metric.total": torch.zeros(1)},
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {},
        "optimizer_states": optimizers,
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 9.0, "width": 7},
    }


def test_lightning(tmp_path: Path) -> None:
    for step, seed, rate in ((9, 0, 0.1), (10, 1, 0.05)):
        content = lightning(toy_model(seed).state_dict(), [adam_state(rate)])
        torch.save(content, tmp_path / f"epoch={step}-step={step}00.ckpt")
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\n")
    found = gr.read_checkpoints(tmp_path)
    assert [checkpoint.name for checkpoint in found] == ["epoch=9-step=900.ckpt", "epoch=10-step=1000.ckpt"]
    assert_table(scores(tmp_path), -0.048105, 0.746337)
    (tmp_path / "version_0" / "checkpoints").mkdir(parents=True)
    torch.save(lightning(WEIGHTS, [adam_state(0.1)]), tmp_path / "version_0" / "checkpoints" / "last.ckpt")
    assert_table(scores(tmp_path / "version_0"), -0.048863, 0.439982)


def test_lightning_with_two_optimizers(tmp_path: Path) -> None:
    torch.save(lightning(WEIGHTS, [adam_state(0.1), adam_state(0.2)]), tmp_path / "gan.ckpt")
    with pytest.raises(CheckpointError, match=r"whose groups have different ones: \[0\.1, 0\.2\]"):
        gr.Checkpoint(tmp_path / "gan.ckpt")
    with pytest.raises(CheckpointError, match="holds 2 optimizers"):
        gr.Checkpoint(tmp_path / "gan.ckpt", learning_rate=0.1).optimizer_state()


def test_the_optimizer_beside_the_weights_is_used(tmp_path: Path) -> None:
    model = toy_model()
    optimizer = Adam(model.parameters(), lr=0.1)
    model(TRAIN[0]).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    given = gr.Checkpoint(model.state_dict(), 0.1, optimizer=tmp_path / "optimizer.pt")
    found = [
        gr.TracIn(model, LOSS, c, update="optimizer").influence(TRAIN, TEST) for c in (given, tmp_path / "both.pt")
    ]
    assert_scores(found[0], found[1])


def test_safetensors(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "a.safetensors", metadata={"learning_rate": "0.1"})
    save_file(WEIGHTS, tmp_path / "b.safetensors")
    assert_table(scores(str(tmp_path / "a.safetensors")), -0.048863, 0.439982)
    with pytest.raises(CheckpointError, match=r"b\.safetensors \(looked at metadata 'learning_rate'\)"):
        gr.Checkpoint(tmp_path / "b.safetensors")
    assert_table(scores(gr.Checkpoint(tmp_path / "b.safetensors", 0.1)), -0.048863, 0.439982)
    (tmp_path / "c.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"c\.safetensors is no whole safetensors file"):
        gr.Checkpoint(tmp_path / "c.safetensors", 0.1)


class Trap:
    """What a hostile file would run."""

    def __reduce__(self) -> Any:
        raise_it = (RuntimeError, ("ran",))
        return exec, (f"raise {raise_it[0].__name__}('ran')",)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    torch.save({"state_dict": WEIGHTS, "learning_rate": 0.1, "config": Trap()}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=r"bad\.pt cannot be read safely.*add_safe_globals"):
        gr.Checkpoint(tmp_path / "bad.pt")
    torch.save(toy_model(), tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match=r"Save the state dict"):
        gr.Checkpoint(tmp_path / "whole.pt", 0.1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"a": 3, "learning_rate": 0.1}, "holds no weights; its keys are 'a'"),
        (adam_state(0.1), "is the state of an optimizer"),
        (toy_model(), r"found a Sequential\. Give model\.state_dict\(\)"),
        ({**WEIGHTS, "learning_rate": -0.1}, "allowed are numbers from 0"),
        ({**WEIGHTS, "learning_rate": float("nan")}, "allowed are numbers from 0"),
        ({**WEIGHTS, "learning_rate": "fast"}, "No learning rate is known"),
    ],
    ids=["keys", "optimizer", "model", "negative", "nan", "text"],
)
def test_what_is_no_checkpoint_is_named(source: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        gr.Checkpoint(source)


def test_files_that_are_not_there_or_broken(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "model-1.pt")
    with pytest.raises(CheckpointError, match=r"There is no .*model-2\.pt; beside it lie 'model-1\.pt'"):
        gr.Checkpoint(tmp_path / "model-2.pt", 0.1)
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"empty\.pt is no file of torch\.save"):
        gr.Checkpoint(tmp_path / "empty.pt", 0.1)
    (tmp_path / "model-1.pt").write_bytes((tmp_path / "model-1.pt").read_bytes()[:300])
    with pytest.raises(CheckpointError, match=r"model-1\.pt is no file of torch\.save"):
        gr.Checkpoint(tmp_path / "model-1.pt", 0.1)
    (tmp_path / "void").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoints"):
        gr.read_checkpoints(tmp_path / "void")
    with pytest.raises(CheckpointError, match="checkpoints is empty"):
        gr.TracIn(toy_model(), LOSS, [])
    with pytest.raises(CheckpointError, match="checkpoints holds a float"):
        gr.TracIn(toy_model(), LOSS, [0.1])


def test_weights_that_do_not_fit_are_spelled_out() -> None:
    lacking = {name: value for name, value in WEIGHTS.items() if name != "2.bias"}
    with pytest.raises(CheckpointError, match=r"does not fit Sequential: it lacks 2\.bias .*; it has 2\.bais"):
        scores({**lacking, "2.bais": WEIGHTS["2.bias"], "learning_rate": 0.1})
    broken = {**WEIGHTS, "2.bias": WEIGHTS["2.bias"] * torch.nan}
    with pytest.raises(CheckpointError, match=r"'2\.bias' holds NaN"):
        scores({**broken, "learning_rate": 0.1})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "net.inner."])
def test_prefixes_of_wrappers(prefix: str) -> None:
    wrapped = {prefix + name: value for name, value in WEIGHTS.items()}
    assert_table(scores({**wrapped, "learning_rate": 0.1}), -0.048863, 0.439982)


@pytest.mark.parametrize("kept", ["a.weight", "b.weight"])
def test_tied_weights_under_one_name_only(kept: str, tmp_path: Path) -> None:
    model = made(Tied)
    dropped = {"a.weight": "b.weight", "b.weight": "a.weight"}[kept]
    weights = {name: value for name, value in model.state_dict().items() if name != dropped}
    save_file(weights, tmp_path / "tied.safetensors")
    assert_scores(scores(gr.Checkpoint(tmp_path / "tied.safetensors", 1.0), made(Tied, 3)), brute(model))


def test_identical_checkpoints_are_noticed() -> None:
    model = toy_model()
    first = gr.Checkpoint(model.state_dict(), 0.1)
    with pytest.warns(AttributionWarning, match=r"Checkpoints 0 and 1, .* hold the same weights; they count twice"):
        scores([first, gr.Checkpoint(model.state_dict(), 0.2)])


def test_a_state_dict_is_copied() -> None:
    """Training on must not change a checkpoint that was taken before."""
    model = toy_model()
    optimizer, checkpoints = SGD(model.parameters(), lr=0.1), []
    expected = torch.zeros(4, 11, dtype=torch.float64)
    for _ in range(2):
        checkpoints.append(gr.Checkpoint(model.state_dict(), 0.1))
        expected += 0.1 * brute(model)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(TRAIN[0]), TRAIN[1]).backward()
        optimizer.step()
    assert_scores(scores(checkpoints), expected)


def test_the_state_of_an_optimizer_is_copied_too() -> None:
    model = toy_model()
    optimizer = Adam(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(TRAIN[0]), TRAIN[1]).backward()
        optimizer.step()

    step()
    taken = [
        gr.Checkpoint(model.state_dict(), optimizer=optimizer.state_dict()),
        gr.Checkpoint({"model": model.state_dict(), "optimizer": optimizer.state_dict()}),
    ]
    assert [checkpoint.learning_rate for checkpoint in taken] == [0.1, 0.1]
    before = [gr.TracIn(model, LOSS, c, update="optimizer").influence(TRAIN, TEST) for c in taken]
    step()
    after = [gr.TracIn(model, LOSS, c, update="optimizer").influence(TRAIN, TEST) for c in taken]
    assert torch.equal(before[0], before[1])
    assert torch.equal(torch.stack(before), torch.stack(after))


def test_a_learning_rate_of_zero_is_said() -> None:
    with pytest.warns(AttributionWarning, match=re.escape("counts nothing: its learning rate is 0 (given)")):
        gr.TracIn(toy_model(), LOSS, gr.Checkpoint(WEIGHTS, 0.0))
