"""Search by FAISS: what it finds has exact scores; without the package it says what to install."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.tracin.index import _faiss

INSTALLED = importlib.util.find_spec("faiss") is not None


def make(dtype=torch.float32, rows=300):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    x, y = torch.randn(rows + 7, 6, dtype=dtype), torch.randint(0, 3, (rows + 7,))
    checkpoints = [
        gr.Checkpoint(net.state_dict(), 0.1),
        gr.Checkpoint({n: 2 * v for n, v in net.state_dict().items()}, 0.2),
    ]
    tracin = gr.TracIn(net, gr.loss(F.cross_entropy), checkpoints, normalize="cosine", show_progress=False)
    return tracin, (x[:rows], y[:rows]), (x[rows:], y[rows:])


@pytest.mark.skipif(not INSTALLED, reason="faiss is not installed (extra faiss)")
@pytest.mark.parametrize("lists", [False, True])
def test_scores_are_exact_and_few_are_missed(tmp_path, monkeypatch, lists):
    if lists:
        monkeypatch.setattr(_faiss, "_FLAT_ROWS", 10)
    tracin, train, test = make()
    index = tracin.index(train, tmp_path)
    exact, found = index.top_k(test, 5), index.top_k(test, 5, search="faiss")
    scores = index.influence(test)
    for which in ("proponents", "opponents"):
        own = getattr(found, which)
        torch.testing.assert_close(own.scores, scores.gather(1, own.columns), rtol=1e-4, atol=1e-6)
        if not lists:
            assert torch.equal(own.columns, getattr(exact, which).columns)
    again = tracin.index(train, tmp_path)
    assert torch.equal(again.top_k(test, 5, search="faiss").proponents.columns, found.proponents.columns)


@pytest.mark.skipif(not INSTALLED, reason="faiss is not installed (extra faiss)")
def test_double_precision_is_refused(tmp_path):
    tracin, train, test = make(torch.float64, 20)
    with pytest.raises(GradregError, match="float32 only"):
        tracin.index(train, tmp_path).top_k(test, 2, search="faiss")


def test_without_the_package(tmp_path, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(_faiss.importlib, "import_module", absent)
    tracin, train, test = make(rows=20)
    index = tracin.index(train, tmp_path)
    with pytest.raises(GradregError, match=r"pip install 'gradreg\[faiss\]'"):
        index.top_k(test, 2, search="faiss")
    with pytest.raises(GradregError, match="allowed are 'exact' and 'faiss'"):
        index.top_k(test, 2, search="annoy")
