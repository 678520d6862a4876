"""LDS, flipped labels and removal: known answers of the measures, and a small run of the whole program."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gradreg.experiments import cli
from gradreg.experiments.attribution.digits import load_digits, log_odds, make_model, train
from gradreg.experiments.attribution.lds import lds, outcomes_of_subsets, random_halves
from gradreg.experiments.attribution.mislabels import auc, flipped
from gradreg.experiments.attribution.removal import nearest


def test_lds_of_additive_outcomes_is_one():
    generator = torch.Generator().manual_seed(0)
    scores, masks = torch.randn(5, 40, generator=generator), random_halves(30, 40)
    outcomes = masks.float() @ scores.T
    assert lds(scores, masks, outcomes, draws=0)["lds"] == pytest.approx(1)
    assert lds(-scores, masks, outcomes, draws=0)["lds"] == pytest.approx(-1)
    assert lds(scores, masks, outcomes.exp(), draws=0)["lds"] == pytest.approx(1)  # ranks alone count
    noisy = lds(scores, masks, outcomes + 5 * torch.randn(outcomes.shape, generator=generator), draws=200)
    assert noisy["low"] < noisy["lds"] < noisy["high"]
    assert 0.3 < noisy["lds"] < 0.99


def test_lds_is_the_mean_of_spearman():
    from scipy.stats import spearmanr

    generator = torch.Generator().manual_seed(1)
    scores, masks = torch.randint(0, 3, (4, 12), generator=generator).float(), random_halves(9, 12)
    outcomes = torch.randint(0, 4, (9, 4), generator=generator).float()
    predicted = (masks.float() @ scores.T).numpy()
    expected = np.mean([spearmanr(predicted[:, t], outcomes[:, t].numpy())[0] for t in range(4)])
    assert lds(scores, masks, outcomes, draws=0)["lds"] == pytest.approx(expected)


def test_an_interval_shrinks_with_more_tests():
    generator = torch.Generator().manual_seed(0)
    widths = []
    for tests in (4, 100):
        scores, masks = torch.randn(tests, 40, generator=generator), random_halves(40, 40)
        outcomes = masks.float() @ scores.T + 5 * torch.randn(40, tests, generator=generator)
        found = lds(scores, masks, outcomes, draws=200)
        widths.append(found["high"] - found["low"])
    assert widths[1] < 0.6 * widths[0]


def test_halves():
    masks = random_halves(6, 11)
    assert masks.sum(1).tolist() == [5] * 6
    assert len({tuple(mask.tolist()) for mask in masks}) == 6
    assert torch.equal(masks, random_halves(6, 11))


def test_retraining_starts_from_fresh_weights():
    """Row 35: (S1, S2) and (S2, S1) with the same seed give equal losses, bit for bit."""
    digits = load_digits(60, 10)
    masks = random_halves(2, 60)

    def fit(mask, seed):
        model, _ = train(digits.train_x[mask], digits.train_y[mask], seed, 1)
        return F.cross_entropy(model(digits.test_x), digits.test_y, reduction="none").detach()

    torch.manual_seed(1)
    before = torch.get_rng_state()
    forward = outcomes_of_subsets(masks, 2, fit)
    backward = outcomes_of_subsets(masks.flip(0), 2, fit)
    assert torch.equal(forward, backward.flip(0))
    assert not torch.equal(forward[0], forward[1])
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(make_model(1)[0].weight, make_model(2)[0].weight)


def test_log_odds():
    model = torch.nn.Linear(3, 4).double()
    x, y = torch.randn(5, 3).double(), torch.tensor([0, 1, 2, 3, 0])
    p = model(x).softmax(1)[range(5), y]
    torch.testing.assert_close(log_odds(model, x, y), (p / (1 - p)).log().detach())


def test_auc_is_that_of_sklearn():
    from sklearn.metrics import roc_auc_score

    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(80, generator=generator) < 0.2
    values = (torch.randn(80, generator=generator) + positive).mul(3).round()  # with ties
    found = auc(values, positive, draws=100)
    assert found["auc"] == pytest.approx(roc_auc_score(positive, values))
    assert found["low"] < found["auc"] < found["high"]


def test_flipped_labels():
    y = torch.arange(200) % 10
    labels, wrong = flipped(y, 0.1)
    assert int(wrong.sum()) == 20
    assert torch.equal(labels != y, wrong)
    assert set(labels.tolist()) <= set(range(10))


def test_nearest_prefers_the_own_class():
    digits = load_digits(100, 10)
    best = nearest(digits).argmax(1)
    assert torch.equal(digits.train_y[best], digits.test_y)


def test_the_program(tmp_path, capsys):
    small = (
        "--examples 120 --tests 12 --subsets 5 --retrainings 1 --epochs 1 --draws 20 --removed 3 30 --removal-tests 2"
    )
    out = tmp_path / "results.json"
    assert cli.main(["evaluate-tracin", *small.split(), "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert set(results) == {"lds", "mislabels", "removal"}
    scores = results["lds"]["methods"]
    assert scores["TracIn"]["lds"] == pytest.approx(scores["TracIn, brute force"]["lds"], abs=1e-6)
    assert {"plain loss, last checkpoint", "TracIn self-influence"} <= set(results["mislabels"]["methods"])
    assert all(len(cells) == 2 for cells in results["removal"]["methods"].values())
    shown = capsys.readouterr().out
    assert "plain loss, last checkpoint" in shown
    assert "12 of 120 labels were flipped" in shown
    assert cli.main(["evaluate-tracin", "--subsets", "0", "--out", str(tmp_path / "no.json")]) == 2
    assert "--subsets is out of range" in capsys.readouterr().err
