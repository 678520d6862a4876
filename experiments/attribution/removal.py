"""Removal curves: how far does an outcome fall when the strongest proponents are taken away and training is repeated?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.experiments.attribution.digits import Digits, log_odds, train

__all__ = ["nearest", "run_removal"]


def nearest(digits: Digits) -> Tensor:
    """Return a baseline of scores without any model: cosine of pixels, of training examples of the test's class alone."""
    cosine = F.normalize(digits.test_x, dim=1) @ F.normalize(digits.train_x, dim=1).T
    return torch.where(digits.test_y[:, None] == digits.train_y[None], cosine, -torch.ones(()))


def run_removal(
    digits: Digits, methods: Mapping[str, Callable[[nn.Module, list[gr.Checkpoint]], Tensor]], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure, per method and number of removed examples, the mean fall of log odds of the true class.

    Args:
        digits: The data.
        methods: From a trained model and its checkpoints to scores `[tests, examples]`.
        config: `removed` (numbers of examples), `tests` (how many; each needs trainings of its own), `retrainings`, `epochs`.

    Returns:
        Per method a list of `mean` and `error` (standard error over tests) for every number.
    """
    tests, seeds = config["tests"], range(1, config["retrainings"] + 1)
    x, y = digits.test_x[:tests], digits.test_y[:tests]

    def outcomes(kept: Tensor) -> Tensor:
        fits = [train(digits.train_x[kept], digits.train_y[kept], seed, config["epochs"])[0] for seed in seeds]
        return torch.stack([log_odds(model, x, y) for model in fits]).mean(0)

    everything = torch.ones(len(digits.train_x), dtype=torch.bool)
    whole = outcomes(everything)
    model, checkpoints = train(digits.train_x, digits.train_y, 0, config["epochs"])
    rows: dict[str, list[dict[str, float]]] = {}
    for name, method in methods.items():
        order = method(model, checkpoints)[:tests].argsort(dim=1, descending=True, stable=True)
        rows[name] = []
        for count in config["removed"]:
            falls = []
            for test in range(tests):
                kept = everything.clone()
                kept[order[test, :count]] = False
                falls.append(float(whole[test] - outcomes(kept)[test]))
            rows[name].append(_mean(falls))
    rows["random"] = []
    generator = torch.Generator().manual_seed(0)
    for count in config["removed"]:
        kept = everything.clone()
        kept[torch.randperm(len(kept), generator=generator)[:count]] = False
        rows["random"].append(_mean((whole - outcomes(kept)).tolist()))
    return {"removed": list(config["removed"]), "tests": tests, "retrainings": len(seeds), "methods": rows}


def _mean(falls: list[float]) -> dict[str, float]:
    values = torch.tensor(falls)
    error = float(values.std() / len(falls) ** 0.5) if len(falls) > 1 else 0.0
    return {"mean": float(values.mean()), "error": error}
