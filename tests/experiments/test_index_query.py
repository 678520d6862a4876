"""`gradreg index` and `gradreg query`: from a run and from a user's own objects to table, JSON, CSV and page."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import gradreg as gr
from gradreg.experiments.attribution import index as index_program
from gradreg.experiments.attribution import query as query_program
from gradreg.experiments.validate import ConfigError, check

MINE = """
import torch
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3))


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 4, 4, generator=generator)
    return [(x[i], int(x[i, 0, 0] * 3)) for i in range(count)]


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.e, self.o = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)

    def forward(self, input_ids):
        return self.o(torch.tanh(self.e(input_ids)))


def texts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, 9, (3 + i % 3,), generator=generator) for i in range(count)]
    return [{"input_ids": one, "labels": one.roll(-1)} for one in ids]


def decoder():
    return lambda ids: [f"<word{i}>" for i in ids]
"""


def settings(name, *overrides):
    with initialize_config_module("gradreg.conf", version_base="1.3"):
        config = compose(name, overrides=["progress=false", *overrides])
    plain = OmegaConf.to_container(config, resolve=True)
    program = index_program if name == "index" else query_program
    check(plain, program._problems)
    return plain


def index(*overrides):
    index_program._work(settings("index", *overrides))


def query(*overrides):
    query_program._work(settings("query", *overrides))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A package of the user's own, and checkpoints of its model."""
    (tmp_path / "mine_of_a_user.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("mine_of_a_user", None)
    import mine_of_a_user

    (tmp_path / "saved").mkdir()
    for step in (1, 2):
        weights = mine_of_a_user.model().state_dict()
        weights = {name: value * (1 + step / 4) for name, value in weights.items()}
        torch.save({**weights, "learning_rate": 0.1 / step}, tmp_path / "saved" / f"step-{step}.pt")
    yield mine_of_a_user
    sys.modules.pop("mine_of_a_user", None)


OWN = (
    "allow_targets=[mine_of_a_user]",
    "+model={_target_: mine_of_a_user.model}",
    "+train={_target_: mine_of_a_user.rows, count: 20, seed: 0}",
    "checkpoints=saved",
    "path=index",
)
OWN = tuple(word.removeprefix("+") for word in OWN)
TEST = ("allow_targets=[mine_of_a_user]", "test={_target_: mine_of_a_user.rows, count: 6, seed: 1}")


def test_from_own_objects_to_answers(mine, tmp_path, capsys):
    index(*OWN, "verify=5")
    text = capsys.readouterr().out
    assert "GradientIndex(20 examples, 2 checkpoints, 123 numbers each)" in text
    assert "100.0% of the parameters are covered" in text
    assert "relative error" in text
    query("index=index", *TEST, "k=3", "count=4")
    shown = capsys.readouterr().out
    tracin = gr.TracIn(mine.model(), gr.loss(F.cross_entropy), "saved", show_progress=False)
    expected = tracin.top_k(mine.rows(20, 0), mine.rows(6, 1)[:4], 3)
    answers = json.loads((tmp_path / "query" / "answers.json").read_text())["answers"]
    with (tmp_path / "query" / "answers.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(answers) == len(table) == 4 * 2 * 3
    for kind, ranking in (("proponent", expected.proponents), ("opponent", expected.opponents)):
        own = [row for row in answers if row["kind"] == kind]
        assert [row["row"] for row in own] == ranking.columns.flatten().tolist()
        torch.testing.assert_close(
            torch.tensor([row["score"] for row in own]), ranking.scores.flatten(), rtol=1e-4, atol=1e-6
        )
    assert [int(row["row"]) for row in table] == [row["row"] for row in answers]
    assert {row["label"] for row in answers} <= {"0", "1", "2"}
    first = answers[0]
    assert f"{first['row']} ({first['label']}) {first['score']:+.3g}" in shown
    page = (tmp_path / "query" / "answers.html").read_text()
    assert page.count("<section") == 4
    assert page.count("<img") == 4 * (1 + 2 * 3)


def test_query_of_chosen_rows_without_a_page(mine, tmp_path):
    index(*OWN, "projection={_target_: gradreg.tracin.TwoSidedProjection, left: 4, right: 4}")
    query("index=index", *TEST, "rows=[5,0]", "k=2", "page=false", "out=there")
    answers = json.loads((tmp_path / "there" / "answers.json").read_text())["answers"]
    assert [row["test_row"] for row in answers[::4]] == [5, 0]
    assert not (tmp_path / "there" / "answers.html").exists()


def test_tokens_are_shaded_by_their_scores(mine, tmp_path):
    torch.save({**mine.Words().state_dict(), "learning_rate": 0.5}, tmp_path / "words.pt")
    index(
        "allow_targets=[mine_of_a_user]",
        "model={_target_: mine_of_a_user.Words}",
        "train={_target_: mine_of_a_user.texts, count: 8, seed: 0}",
        "checkpoints=words.pt",
        "path=words",
    )
    query(
        "index=words",
        "allow_targets=[mine_of_a_user]",
        "test={_target_: mine_of_a_user.texts, count: 2, seed: 1}",
        "decode={_target_: mine_of_a_user.decoder}",
        "k=2",
    )
    page = (tmp_path / "query" / "answers.html").read_text()
    assert "&lt;word" in page
    assert "<word" not in page
    assert page.count("<summary>Scores of the tokens</summary>") == 2 * 4
    assert 'class="token for"' in page
    assert 'class="token against"' in page


def test_from_a_run(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    index(f"run={finished.path}", "arm=penalty", "path=index", "params=heads.**")
    query("index=index", "count=3", "k=2")
    assert "GradientIndex" in capsys.readouterr().out
    page = (tmp_path / "query" / "answers.html").read_text()
    assert page.count("<img") == 3 * 5
    with pytest.raises(gr.GradregError, match="there is no test set 'nothing'"):
        query("index=index", "test=nothing")
    with pytest.raises(gr.GradregError, match="rows: 99999 is no row"):
        query("index=index", "rows=[99999]")
    with pytest.raises(gr.GradregError, match=r"no 'penalti'.*Closest: 'penalty'"):
        index(f"run={finished.path}", "arm=penalti", "path=other")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ["model: a value is required", "checkpoints: a value is required", "path: a value is required"]),
        (("run=nowhere",), ["run: nowhere is no folder of a `gradreg train` run"]),
        (("arm=penalty", "path=x"), ["arm: only a run has arms"]),
        ((*OWN, "workers=0"), ["workers: 0"]),
        ((*OWN, "projection={_target_: gradreg.tracin.TwoSidedProjection, lefft: 3}"), ["Closest: 'left'"]),
        ((*OWN[1:],), ["'mine_of_a_user.model' is not allowed"]),
    ],
)
def test_wrong_settings_of_index(mine, overrides, expected):
    with pytest.raises(ConfigError) as caught:
        settings("index", *overrides)
    for text in expected:
        assert text in str(caught.value)


def test_wrong_settings_of_query(mine, tmp_path):
    with pytest.raises(ConfigError, match="index: a value is required"):
        settings("query")
    with pytest.raises(ConfigError, match="holds no finished index"):
        settings("query", "index=nowhere")
    index(*OWN)
    with pytest.raises(ConfigError, match="k: 0 is not allowed"):
        settings("query", "index=index", "k=0")
    next((tmp_path / "index" / "shards").iterdir()).unlink()
    with pytest.raises(gr.GradregError, match="missing"):
        query("index=index", *TEST)


# forked, for nothing has run here yet: the imports are paid once
RANKS = """
import os, sys
import torch.multiprocessing as mp
from gradreg.experiments.attribution import index

def run(rank):
    os.environ["RANK"] = str(rank)
    with open(f"rank-{rank}.txt", "w") as sys.stdout:
        index.main()

mp.start_processes(run, nprocs=2, start_method="fork")
"""


@pytest.mark.dist
def test_the_same_command_several_times_at_once(mine, tmp_path):
    """As torchrun starts it; and the files are those of one process."""
    index(*OWN, "shard_rows=5")
    command = [sys.executable, "-c", RANKS, *OWN[:-1], "path=both", "shard_rows=5"]
    base = {**os.environ, "PYTHONPATH": str(tmp_path), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=base, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    printed = [(tmp_path / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert ["GradientIndex" in output for output in printed] == [True, False]
    for path in (tmp_path / "index" / "shards").iterdir():
        assert path.read_bytes() == (tmp_path / "both" / "shards" / path.name).read_bytes()
