"""docs/regularizers.md is what its program writes, and the program finds what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

import gradreg as gr
from gradreg.experiments.benchmarks.contests import CONTESTS
from gradreg.experiments.regularizer_page import COSTS, PAGE, formula, page, source
from gradreg.experiments.regularizer_problems import PROBLEMS, Problem, verdict

ROOT = Path(__file__).parents[2]
NAMES = set(gr.regularizers.__all__) - {"Regularizer"}


def test_the_page_is_what_the_program_writes():
    costs = json.loads((ROOT / COSTS).read_text())
    assert (ROOT / PAGE).read_text() == page(costs), "run python -m gradreg.experiments.regularizer_page"


def test_every_regularizer_has_a_row_and_a_cost():
    assert set(PROBLEMS) == set(CONTESTS) == NAMES
    assert set(json.loads((ROOT / COSTS).read_text())["costs"]) == NAMES
    assert all(type(problem.make()).__name__ == name for name, problem in PROBLEMS.items())


@pytest.mark.parametrize(
    "name", ["DiverseHeads", "DerivativeResidual", "HessianPenalty", "FiniteDifferenceGradientNorm"]
)
def test_smooth_networks_hear_of_it(name):
    assert verdict(PROBLEMS[name], nn.Softplus) == "yes"


class Detached(gr.Regularizer):
    def forward(self, model, batch):
        g = gr.gradients(model, batch, gr.true_logit(), gr.Inputs(), differentiable=True)["inputs"]
        return g.square().mean() * g.detach().square().mean()


def test_a_wrong_derivative_is_found():
    assert verdict(Problem(Detached), nn.Softplus) == "no: wrong"


def test_a_silent_part_is_named():
    assert verdict(PROBLEMS["DiverseHeads"], nn.ReLU) == "not the base"
    assert verdict(PROBLEMS["DiverseHeads"], nn.Identity) != "yes"


def test_a_wrong_formula_is_found():
    class Halved(gr.regularizers.FiniteDifferenceGradientNorm):
        def forward(self, model, batch):
            return super().forward(model, batch) / 2

    assert verdict(Problem(Halved, test="formula"), nn.Softplus) == "no: wrong"


class Documented(gr.Regularizer):
    r"""A penalty with $\omega$, namely $\frac1n \sum_i
    \lvert g_i \rvert$.

    References:
        Ada, Bell, Curie, "On 1984", ICML 2019,
        arXiv 1901.00001; Dee 2001.
    """

    def forward(self, model, batch):
        raise NotImplementedError


def test_docstrings_are_read():
    assert formula(Documented) == r"\frac1n \sum_i \lvert g_i \rvert"
    assert source(Documented) == "Ada et al. 2019, [1901.00001](https://arxiv.org/abs/1901.00001)"
