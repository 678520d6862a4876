"""gradreg study: every study in a tiny configuration, what it leaves behind, and wrong configurations."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import gradreg as gr
from gradreg.experiments import studies
from gradreg.experiments.rules import study_problems
from gradreg.experiments.run_directory import RunDirectory
from gradreg.experiments.run_id import content_hash
from gradreg.experiments.studies import job
from gradreg.experiments.studies._study import StudyError
from gradreg.experiments.studies.rrr_decoy_digits import _decoys
from gradreg.experiments.summarize import find_groups
from gradreg.experiments.validate import ConfigError, check
from tests.experiments.test_config import options

TINY = {
    "irm_colored_digits": ["study.steps=4", "study.warm_up=1", "study.batch_size=32", "study.test_draws=1"],
    "jacobian_noise_digits": ["study.steps=3", "study.noise=[0,0.5]", "study.noise_draws=1"],
    "pinn": ["study.iterations=3", "study.interior_points=20", "study.known_points=10"],
    "rrr_decoy_digits": ["study.steps=3"],
    "wgan_gp_mixture": ["study.steps=3", "study.batch_size=16", "study.width=8", "study.samples=100"],
}


def compose_study(name, *overrides):
    with initialize_config_module("gradreg.conf", version_base="1.3"):
        return compose("study", overrides=[f"study={name}", *overrides])


def run_study(root, name, *overrides):
    config = compose_study(name, *TINY[name], *overrides)
    folder = root / content_hash(config)
    return job.run(config, folder, overrides), RunDirectory(folder)


def test_every_study_has_a_configuration_that_repeats_its_defaults():
    assert set(options("study")) == set(TINY)
    built = []
    for name in options("study"):
        plain = OmegaConf.to_container(compose_study(name), resolve=True)
        study = check(plain, study_problems)["study"]
        assert study == type(study)(), name
        built.append(type(study).__name__)
    assert set(built) == set(studies.__all__)


def test_a_sweep_over_studies_can_start():
    with initialize_config_module("gradreg.conf", version_base="1.3"):
        assert compose("study").study._target_.startswith("gradreg.")  # Hydra composes without the swept option first


@pytest.mark.parametrize("name", TINY)
def test_every_study_runs(name, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    metric, run = run_study(tmp_path, name, "seeds=[0,1]")
    results = run.read("results.json")
    assert run.status == "done"
    assert metric == results["metric"]
    assert len(results["reproduced"]) == 2
    for row in results["scores"].values():
        assert all(len(values) == 2 for values in row.values())
    assert not results["notes"]  # no warning about the penalty
    table = (run.path / "results.md").read_text()
    assert "±" in table
    assert all(row in table for row in results["scores"])
    assert "arXiv" in table
    assert table in caplog.text
    picture = (run.path / "plots" / "results.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5000


def test_equal_seeds_give_equal_numbers_and_a_done_study_is_shown(tmp_path, monkeypatch, caplog):
    _, first = run_study(tmp_path / "first", "rrr_decoy_digits", "seeds=[3]", "plots=false")
    _, second = run_study(tmp_path / "second", "rrr_decoy_digits", "seeds=[4,3]", "plots=false")
    of_first, of_second = first.read("results.json"), second.read("results.json")
    for row, columns in of_first["scores"].items():
        for column, values in columns.items():
            assert values[0] == of_second["scores"][row][column][1]
    assert of_first["details"]["3"] == of_second["details"]["3"]
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(studies.RRRDecoyDigits, "run", lambda *_: pytest.fail("run again"))
    run_study(tmp_path / "first", "rrr_decoy_digits", "seeds=[3]", "plots=false")
    assert "Already done" in caplog.text
    assert ",done," in (tmp_path / "first" / "index.csv").read_text()
    assert find_groups([tmp_path / "first"]) == []  # gradreg summarize leaves studies alone


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("pinn", ["seeds=[]"], "seeds: []"),
        ("pinn", ["seeds=3"], "seeds: 3"),
        ("pinn", ["seeds=[1,-1]"], "seeds.1: -1"),
        ("pinn", ["seeds=[1,1]"], "names a seed twice"),
        ("pinn", ["threads=0"], "threads: 0"),
        ("pinn", ["study.width=0"], "study: width: 0 is not allowed; allowed are numbers above 0"),
        ("pinn", ["study.iterations=2.5"], "study.iterations: 2.5 is float; expected int"),
        ("pinn", ["+study.widht=3"], "Closest: 'width'"),
        ("pinn", ["study._target_=os.system"], "'os.system' is not allowed"),
        ("rrr_decoy_digits", ["study.weight=-1"], "weight: -1 is not allowed; allowed are numbers from 0 up"),
        ("rrr_decoy_digits", ["study.weight=nan"], "weight: nan is not allowed"),
        ("irm_colored_digits", ["study.test_correlation=1.5"], "allowed are numbers from 0 to 1"),
        ("irm_colored_digits", ["study.train_correlations=[0.8,two]"], "train_correlations"),
        ("irm_colored_digits", ["study.train_correlations=[]"], "train_correlations: [] is not allowed; give a list"),
        ("jacobian_noise_digits", ["study.noise=[0,-1]"], "noise: [0, -1]"),
        ("jacobian_noise_digits", ["study.noise=0.3"], "noise: 0.3"),
        ("jacobian_noise_digits", ["study.projections=x"], "projections: 'x' is str; expected int"),
    ],
)
def test_wrong_configurations_are_refused_before_work(name, overrides, expected, tmp_path):
    folder = tmp_path / "runs" / "abc"
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        job.run(compose_study(name, *overrides), folder)
    assert expected in str(caught.value)
    assert not folder.exists()


def test_studies_check_themselves():
    with pytest.raises(StudyError, match=r"steps: 0 .* width: True"):
        studies.RRRDecoyDigits(steps=0, width=True)


def test_colors_agree_with_the_noisy_label_at_the_given_rate():
    study, random = studies.IRMColoredDigits(), torch.Generator().manual_seed(0)
    labels = torch.arange(10).repeat(2000)
    images, targets = study._colored(torch.ones(20000, 8, 8), labels, torch.full((20000,), 0.8), random, gray=False)
    color = images[:, 1, 0, 0].long()
    assert torch.equal(images.sum(1), torch.ones(20000, 8, 8))
    assert float((color == targets).double().mean()) == pytest.approx(0.8, abs=0.015)
    assert float((targets == (labels >= 5)).double().mean()) == pytest.approx(0.75, abs=0.015)
    gray, _ = study._colored(torch.ones(4, 8, 8), labels[:4], torch.full((4,), 0.8), random, gray=True)
    assert torch.equal(gray, torch.full((4, 2, 8, 8), 0.5))


def test_decoys_tell_the_label_and_the_mask_covers_them():
    labels = torch.arange(10).repeat(100)
    images, mask = _decoys(torch.zeros(1000, 8, 8), labels, False, torch.Generator().manual_seed(0))
    assert torch.equal(mask.flatten(1).sum(1), torch.full((1000,), 4))
    assert torch.allclose(images.flatten(1).amax(1), 1 - labels / 10)
    assert not images[~mask].any()
    assert int(mask.any(0).sum()) == 16  # all four corners occur
    shown, _ = _decoys(torch.zeros(1000, 8, 8), labels, True, torch.Generator().manual_seed(0))
    agreeing = (shown.flatten(1).amax(1) - (1 - labels / 10)).abs() < 1e-6
    assert 0.05 < float(agreeing.double().mean()) < 0.15


def test_solutions_solve_their_equations():
    for name, equation in studies.PINN(known_points=8)._equations(0).items():
        points = equation.interior.clone().requires_grad_()
        first = torch.autograd.grad(equation.exact(points).sum(), points, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), points)[0][:, 0]
        poisson = -second - torch.pi**2 * torch.sin(torch.pi * points[:, 0])
        left = poisson if name == "Poisson" else first[:, 1] - 0.1 * second
        assert left.detach().abs().max() < 1e-12
        assert equation.known.shape[1] == equation.grid.shape[1] == equation.lines.shape[2]


def test_coverage_counts_modes():
    study = studies.WGANGPMixture()
    found = study._coverage(study._centers()[:3].repeat(100, 1))
    assert found == {"modes covered": 3.0, "good samples": 1.0}
    real = study._real(4000, torch.Generator().manual_seed(0))
    assert study._coverage(real)["modes covered"] == 8
    assert study._coverage(real)["good samples"] > 0.99


def test_notes_of_penalties_are_reported(tmp_path, monkeypatch):
    def noisy(self, seed):
        gr.errors.warn("something to know", gr.errors.ZeroSecondDerivativeWarning)
        return original(self, seed)

    original = studies.RRRDecoyDigits.run
    monkeypatch.setattr(studies.RRRDecoyDigits, "run", noisy)
    _, run = run_study(tmp_path, "rrr_decoy_digits", "seeds=[0,1]", "plots=false")
    assert json.loads((run.path / "results.json").read_text())["notes"] == [
        "ZeroSecondDerivativeWarning: something to know"
    ]
    assert "something to know" in (run.path / "results.md").read_text()
