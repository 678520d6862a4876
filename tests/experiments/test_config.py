"""Composed configurations: every option file is valid, and wrong ones are refused with all their problems."""

from __future__ import annotations

from importlib import resources

import numpy as np
import pytest
from omegaconf import OmegaConf

import gradreg as gr
from gradreg.experiments.job import run
from gradreg.experiments.rules import train_problems
from gradreg.experiments.run_id import content_hash, seedless_hash
from gradreg.experiments.validate import ConfigError, check

CONF = resources.files("gradreg.conf")


def options(group: str) -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in CONF.joinpath(group).iterdir() if "yaml" in file.name)


@pytest.fixture
def problems_of(compose_train):
    def check_all(*overrides: str) -> str:
        plain = OmegaConf.to_container(compose_train(*overrides), resolve=True)
        with pytest.raises(ConfigError) as caught:
            check(plain, train_problems)
        return str(caught.value)

    return check_all


@pytest.mark.parametrize("group", ["arms", "base", "data", "experiment", "heads", "regularizer"])
def test_every_option_file_is_valid(group, tmp_path, monkeypatch, compose_train):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "published" / "train-all").mkdir(parents=True)
    (tmp_path / "published" / "test-mnist").mkdir()
    inputs, targets = np.zeros((2, 2)), np.arange(2)
    np.savez("arrays.npz", train_inputs=inputs, train_targets=targets, test_a_inputs=inputs, test_a_targets=targets)
    needs = {"collages": ["data.folder=published"], "tensors": ["data.path=arrays.npz"]}
    for option in options(group):
        value = f"[{option}]" if group in ("arms", "regularizer") else option
        chosen = [f"{group}={value}"] if group != "experiment" else []
        config = compose_train(*chosen, *needs.get(option, []), experiment=None if chosen else option)
        assert check(OmegaConf.to_container(config, resolve=True), train_problems)["data"] is not None


def test_no_group_was_forgotten():
    folders = {folder.name for folder in CONF.iterdir() if folder.is_dir() and not folder.name.startswith("_")}
    assert folders == {"arms", "base", "data", "experiment", "heads", "regularizer", "study"}


def test_one_file_per_regularizer():
    targets = {
        str(OmegaConf.load(str(CONF / "regularizer" / f"{name}.yaml"))._target_) for name in options("regularizer")
    }
    classes = {
        name
        for name in gr.regularizers.__all__
        if isinstance(getattr(gr.regularizers, name), type) and name != "Regularizer"
    }
    assert targets == {f"gradreg.regularizers.{name}" for name in classes}


def test_all_problems_at_once_with_path_and_closest_match(problems_of):
    text = problems_of(
        "steps=0",
        "seed=-1",
        "device=gpu",
        "base.components=many",
        "optimizer._target_=torch.optim.Adm",
        "+optimizer.learning_rate=1",
        "task._target_=os.system",
        "+regularizers.diverse_heads.similarty=dot",
        "regularizers.diverse_heads.weight=-1",
    )
    for expected in (
        "8 problems",
        "steps: 0",
        "seed: -1",
        "device: 'gpu'",
        "base.components: 'many' is str; expected int",
        "torch.optim has no 'Adm'",
        "'Adam'",
        "task._target_: 'os.system' is not allowed",
        "regularizers.diverse_heads.similarty: gradreg.regularizers.DiverseHeads takes no argument 'similarty'",
        "Closest: 'similarity'",
        "regularizers.diverse_heads.weight: -1",
    ):
        assert expected in text
    assert text.count("steps: 0") == 1  # not once more for every arm that takes it over


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["heads.count=1"], "arms.penalty.heads.count: 1 head"),
        (["heads.count=0"], "heads.count: 0"),
        (["arms=[]", "upper_bound=null"], "arms: nothing to train"),
        (["+arms.penalty.stps=3"], "arms.penalty.stps: unknown"),
        (["arms.penalty.regularizers=maybe"], "arms.penalty.regularizers: 'maybe'"),
        (["proximal.strength=-1"], "proximal: strength is -1"),
        (["base.height=8.5"], "base.height: 8.5 is float; expected int"),
        (["optimizer._target_=torch.os.system"], "torch has no 'os'"),
        (["optimizer._target_=torch.hub.urlopen"], "comes from 'urllib.request', which is not allowed"),
        (["optimizer._target_=torch.nn.Linear"], "cannot stand here"),
        (["task._target_=torch.pi"], "cannot be called"),
        (["regularizers.diverse_heads.weight=inf"], "weight: inf"),
        (["+regularizers.task=${regularizers.diverse_heads}"], "taken by the logs"),
        (["batch_size=2.5"], "batch_size: 2.5"),
        (["threads=0"], "threads: 0"),
        (["data.pairs=[[0,0],[1,2],[3,4],[5,6]]"], "two different digits"),
        (["data.noise=[0]"], "noise is [0]"),
        (["regularizers.diverse_heads.similarity=cosin"], "cosin"),
        (["data.noise=3"], "data: noise is 3; expected a list with one number per pair"),
        (["data.pairs=[1,2,3,4]"], "pairs holds 1"),
        (["optimizer.lr=-1"], "optimizer.lr: -1 is not allowed"),
        (["+optimizer.eps=-1"], "optimizer: Invalid epsilon value: -1"),
        (["heads.activation=rleu"], "Closest: 'relu'"),
        (["learning_rate_schedule=foo"], "learning_rate_schedule: 'foo' is not allowed; allowed are null"),
        (
            ["learning_rate_schedule={_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: x}"],
            "learning_rate_schedule",
        ),
        (["data=tensors", "data.path=absent.npz", "optimizer.lr=-1"], "2 problems"),
        (["+data.exampels=3"], "Closest: 'examples'"),
    ],
)
def test_wrong_values(overrides, expected, problems_of):
    assert expected in problems_of(*overrides)


def test_schedules_are_checked_inside(problems_of):
    wrong = "regularizers.diverse_heads.weight={_target_: gradreg.schedules.WarmUp, weight: -1.0, stesp: 5}"
    text = problems_of(wrong)
    assert "weight.stesp" in text
    assert "requires the argument 'steps'" in text
    assert "weight.weight: -1.0" in text


def test_refused_configuration_leaves_nothing_behind(tmp_path, compose_train):
    folder = tmp_path / "runs" / "abc"
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError):
        run(compose_train("steps=0"), folder)
    assert not folder.exists()
    assert not (tmp_path / "runs" / "index.csv").exists()


def test_missing_path_is_named(problems_of):
    assert "data.path: a value is required; give data.path=..." in problems_of("data=tensors")


def test_run_id_depends_on_what_is_computed_only(compose_train):
    plain = content_hash(compose_train())
    assert plain == content_hash(compose_train("threads=2", "device=cpu", "force=true", "runs=elsewhere"))
    assert plain == content_hash(compose_train("seed=0"))
    assert plain != content_hash(compose_train("seed=1"))
    assert plain != content_hash(compose_train("regularizers.diverse_heads.weight=9"))
    assert seedless_hash(compose_train("seed=1")) == seedless_hash(compose_train("seed=2"))
    assert seedless_hash(compose_train("steps=7")) != seedless_hash(compose_train())
