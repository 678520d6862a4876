"""`gradreg evaluate-tracin`: what TracIn's scores are worth on digits, beside baselines, with confidence intervals."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.experiments.attribution.digits import Digits, load_digits
from gradreg.experiments.attribution.lds import run_lds
from gradreg.experiments.attribution.mislabels import run_mislabels
from gradreg.experiments.attribution.removal import nearest, run_removal
from gradreg.experiments.files import write_json
from gradreg.experiments.report import markdown_table, wrap
from gradreg.tracin import TwoSidedProjection

__all__ = ["main"]

Method = Callable[[nn.Module, list[gr.Checkpoint]], Tensor]


def methods_for(digits: Digits) -> dict[str, Method]:
    """Return what is compared, from a model and its checkpoints to scores `[tests, examples]`."""
    train, test = (digits.train_x, digits.train_y), (digits.test_x, digits.test_y)

    def tracin(**options: Any) -> Method:
        def scores(model: nn.Module, checkpoints: list[gr.Checkpoint]) -> Tensor:
            return gr.TracIn(model, gr.loss(F.cross_entropy), checkpoints, show_progress=False, **options).influence(
                train, test
            )

        return scores

    def projected(model: nn.Module, checkpoints: list[gr.Checkpoint]) -> Tensor:
        projection = TwoSidedProjection(left=16, right=16)
        one = gr.TracIn(model, gr.loss(F.cross_entropy), checkpoints, projection=projection, show_progress=False)
        with tempfile.TemporaryDirectory() as folder:
            return one.index(train, folder).influence(test)

    def brute_force(model: nn.Module, checkpoints: list[gr.Checkpoint]) -> Tensor:
        total = torch.zeros(len(test[0]), len(train[0]))
        parameters = list(model.parameters())

        def rows(x: Tensor, y: Tensor) -> Tensor:
            losses = (F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x)))
            return torch.stack(
                [torch.cat([g.flatten() for g in torch.autograd.grad(one, parameters)]) for one in losses]
            )

        for checkpoint in checkpoints:
            model.load_state_dict(checkpoint.load().weights)
            total += checkpoint.learning_rate * rows(*test) @ rows(*train).T
        return total

    def pixels(model: nn.Module, checkpoints: list[gr.Checkpoint]) -> Tensor:
        return nearest(digits)

    def noise(model: nn.Module, checkpoints: list[gr.Checkpoint]) -> Tensor:
        return torch.randn(len(test[0]), len(train[0]), generator=torch.Generator().manual_seed(0))

    return {
        "TracIn": tracin(),
        "TracIn, brute force": brute_force,
        "TracIn, cosine": tracin(normalize="cosine"),
        "TracIn, RelatIF": tracin(normalize="relatif"),
        "TracIn, last layer": tracin(params="2.*"),
        "TracIn, projected 16 x 16": projected,
        "pixels": pixels,
        "random": noise,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables and write them as JSON."""
    parser = argparse.ArgumentParser("gradreg evaluate-tracin", description=__doc__.split(": ", 1)[1])
    parts = ("lds", "mislabels", "removal")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="what to measure (all)")
    parser.add_argument("--examples", type=int, default=1437, help="training examples (1437)")
    parser.add_argument("--tests", type=int, default=100, help="test examples of LDS (100)")
    parser.add_argument("--subsets", type=int, default=60, help="random halves of LDS (60)")
    parser.add_argument("--retrainings", type=int, default=2, help="trainings per subset (2)")
    parser.add_argument("--share", type=float, default=0.1, help="flipped labels (0.1)")
    parser.add_argument("--removed", type=int, nargs="+", default=[10, 40, 160], help="examples to remove (10 40 160)")
    parser.add_argument("--removal-tests", type=int, default=8, help="test examples of the removal curves (8)")
    parser.add_argument("--epochs", type=int, default=4, help="per learning rate (4)")
    parser.add_argument("--draws", type=int, default=500, help="bootstrap draws (500)")
    parser.add_argument("--out", type=Path, default=Path("evaluate-tracin.json"), help="where the results go as JSON")
    given = parser.parse_args(arguments)
    wrong = [
        f"--{name.replace('_', '-')}" for name in ("subsets", "retrainings", "tests", "epochs") if vars(given)[name] < 1
    ]
    if wrong or not 0 < given.share < 1:
        print(f"gradreg evaluate-tracin: {', '.join(wrong) or '--share'} is out of range.", file=sys.stderr)
        return 2
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for matrices this small, and the same numbers everywhere
    try:
        results = _measure(given)
    finally:
        torch.set_num_threads(before)
    write_json(given.out, results)
    print(f"Written to {given.out}.")
    return 0


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    digits = load_digits(given.examples, given.tests)
    common = {"epochs": given.epochs, "draws": given.draws, "retrainings": given.retrainings}
    methods = methods_for(digits)
    for part in given.only:
        started = time.perf_counter()
        if part == "lds":
            results[part] = run_lds(digits, methods, {**common, "subsets": given.subsets, "progress": True})
            print(_lds_table(results[part]))
        elif part == "mislabels":
            results[part] = run_mislabels(digits, {**common, "share": given.share})
            print(_mislabel_table(results[part]))
        else:
            chosen = {name: methods[name] for name in ("TracIn", "TracIn, cosine", "pixels")}
            tests = min(given.removal_tests, given.tests)
            results[part] = run_removal(digits, chosen, {**common, "removed": given.removed, "tests": tests})
            print(_removal_table(results[part]))
        results[part]["seconds"] = round(time.perf_counter() - started, 1)
        print(f"({results[part]['seconds']} s)\n")
    return results


def _lds_table(result: dict[str, Any]) -> str:
    rows = [
        [name, f"{row['lds']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}"] for name, row in result["methods"].items()
    ]
    note = (
        f"Linear datamodeling score: rank correlation, over {result['subsets']} random halves of the data, of summed scores with "
        f"the log odds of the true class after training on the half ({result['retrainings']} trainings each from fresh "
        f"weights), averaged over {result['tests']} tests. 95 % bootstrap interval over halves and tests."
    )
    return "\n".join([*markdown_table(["LDS", "mean", "95 %"], rows), "", wrap(note)])


def _mislabel_table(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{row['auc']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
            f"{row['found_in_10_percent']:.0%}",
            f"{row['found_in_20_percent']:.0%}",
        ]
        for name, row in result["methods"].items()
    ]
    note = f"{result['flipped']} of {result['examples']} labels were flipped before training; 95 % bootstrap interval."
    header = ["flipped labels", "AUC", "95 %", "found in top 10 %", "in top 20 %"]
    return "\n".join([*markdown_table(header, rows), "", wrap(note)])


def _removal_table(result: dict[str, Any]) -> str:
    rows = [
        [name, *(f"{cell['mean']:+.2f} ± {cell['error']:.2f}" for cell in cells)]
        for name, cells in result["methods"].items()
    ]
    note = (
        f"Fall of the log odds of the true class after the strongest proponents of a test were removed and training repeated, "
        f"mean and standard error over {result['tests']} tests; larger is better. Rows 'pixels' and 'random' need no model."
    )
    return "\n".join([*markdown_table(["removed", *map(str, result["removed"])], rows), "", wrap(note)])


if __name__ == "__main__":
    sys.exit(main())
