"""The command line: overview, errors, sweeps, other folders and users' own configurations."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import resources

import pytest
from omegaconf import OmegaConf

from gradreg.experiments import cli
from gradreg.experiments.environment import gradreg_version
from gradreg.experiments.hints import null_lists, override_hints
from gradreg.experiments.usage import usage
from tests.experiments.in_process import call


def start(folder, *arguments):
    """As users do, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "gradreg.experiments.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, env=environment)


def test_overview_and_version(capsys):
    assert cli.main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gradreg {gradreg_version()}\n"
    assert cli.main([]) == 2


@pytest.mark.parametrize("name", ["attribute", "attention", "similarity", "index", "query"])
def test_help_explains_every_option_of_commands_in_one_file(name, capsys):
    assert cli.main([name, "--help"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith(f"gradreg {name}: ")
    options = re.findall(r"^(\w+):.*?(#.*)?$", printed.out.split("Options, ")[1], flags=re.MULTILINE)
    config = OmegaConf.load(resources.files("gradreg.conf") / f"{name}.yaml")
    assert [key for key, _ in options] == [key for key in config if key not in ("defaults", "hydra")]
    assert all(comment for _, comment in options)


def test_help_is_that_of_hydra_where_there_are_groups():
    for name in ("train", "check", "study"):
        assert usage(name) is None


def test_unknown_command_names_the_closest(capsys):
    assert cli.main(["trian"]) == 2
    assert "unknown command 'trian'. Closest: 'train'" in capsys.readouterr().err


def test_missing_packages_name_the_extra(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "hydra" else object())
    assert cli.main(["train"]) == 2
    assert "pip install 'gradreg[experiments]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("arms=[penalti]", "arms has no 'penalti'; there are no_penalty, penalty"),
        ("data=colages", "data has no 'colages'"),
        ("stpes=3", "Closest: 'steps'"),
        ("regularizers.diverse_heads.similarty=dot", "Closest: 'regularizers.diverse_heads.similarity'"),
    ],
)
def test_hints(override, expected):
    (hint,) = override_hints(["-m", override, "seed=1", "+new=2", "hydra/launcher=basic"], "train")
    assert expected in hint


@pytest.mark.parametrize(
    "overrides",
    [("data=tensors", "data.path=my.npz"), ("data=collages", "data.folder=here", "data.limit=3"), ("seed=1", "seed=1")],
)
def test_no_hints_for_keys_of_the_chosen_options(overrides):
    assert override_hints(overrides, "train") == []


def test_only_close_names_are_offered_and_each_once():
    assert override_hints(["qqq=1", "qqq=1"], "train") == [
        "The configuration has no 'qqq'. `--cfg job` shows all keys."
    ]
    assert override_hints(["lr=1"], "train") == ["The configuration has no 'lr'. Closest: 'optimizer.lr'."]


def test_null_for_a_list_of_options_is_refused():
    (problem,) = null_lists(["regularizer=null", "arms=[]", "proximal=null", "base=trainable", "-m"], "train")
    assert problem.startswith("regularizer: null is not allowed")
    assert problem.endswith("'regularizer=[]'.")


def test_failed_jobs_of_a_sweep_are_listed_after_the_table(tmp_path):
    given = ("experiment=smoke", "plots=false", "arms=[penalty]", "upper_bound=null")
    done = call(tmp_path, "train", "-m", *given, "batch_size=16,65", "seed=0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "HYDRA_FULL_ERROR" not in done.stderr
    assert "Test accuracy, seed 0" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "1 of 2 jobs failed: " in line]
    assert "batch_size=65 seed=0: batch_size: 65 is more than the 64 training examples" in line


def test_sweep_from_another_folder_with_own_configuration(tmp_path):
    mine = tmp_path / "mine" / "experiment"
    mine.mkdir(parents=True)
    (mine / "tiny.yaml").write_text(
        "# @package _global_\ndefaults: [smoke]\nsteps: 3\nupper_bound: null\nplots: false\n"
    )
    done = start(
        tmp_path, "train", "--config-dir", "mine", "experiment=tiny", "arms=[no_penalty,penalty]", "-m", "seed=0,1"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"gradreg {gradreg_version()} train: starting ...")
    folders = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert all((folder / "done.json").exists() for folder in folders)
    summary = (tmp_path / "runs" / "summary.md").read_text()
    assert "±" in summary
    assert "over seeds 0, 1" in summary
    assert "Penalty minus no penalty" in summary
    assert summary in done.stdout
    assert (tmp_path / "runs" / "index.csv").read_text().count(",done,") == 2


def test_module_prints_the_configuration_alone(tmp_path):
    done = call(tmp_path, "--cfg", "job", module="gradreg.experiments.train")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("seed: 0\n")
    assert not list(tmp_path.iterdir())


def test_refused_configuration_is_shown_without_traceback(tmp_path):
    done = call(tmp_path, "train", "steps=0", "arms=[penalty]")
    assert done.returncode == 1
    assert "steps: 0 is not allowed" in done.stderr
    assert "Traceback" not in done.stderr
    assert "HYDRA_FULL_ERROR" not in done.stderr
    assert "Closest" not in done.stderr
    assert not list((tmp_path / "runs").iterdir())
