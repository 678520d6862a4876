"""Finding flipped labels: self-influence beside the plain loss, which needs no attribution at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gradreg as gr
from gradreg.experiments.attribution.digits import Digits, train

__all__ = ["auc", "flipped", "run_mislabels"]


def flipped(y: Tensor, share: float, classes: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return labels of which a share was replaced by another class, and a mask of these."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.zeros(len(y), dtype=torch.bool)
    wrong[torch.randperm(len(y), generator=generator)[: round(share * len(y))]] = True
    shift = torch.randint(1, classes, (len(y),), generator=generator)
    return torch.where(wrong, (y + shift) % classes, y), wrong


def auc(values: Tensor, positive: Tensor, draws: int = 500, seed: int = 0) -> dict[str, float]:
    """Return the area under the ROC curve, with a 95 % bootstrap interval over examples.

    It is the probability that a positive has a larger value than a negative; equal values count half.
    """
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(draws):
        rows = torch.randint(0, len(values), (len(values),), generator=generator)
        if 0 < int(positive[rows].sum()) < len(rows):
            found.append(_auc(values[rows], positive[rows]))
    value = _auc(values, positive)
    if not found:
        return {"auc": value, "low": value, "high": value}
    low, high = torch.tensor(found).quantile(torch.tensor([0.025, 0.975])).tolist()
    return {"auc": value, "low": low, "high": high}


def _auc(values: Tensor, positive: Tensor) -> float:
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts - 1) / 2)[inverse]
    ones = int(positive.sum())
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * (len(values) - ones)))


def _found(values: Tensor, positive: Tensor, share: float) -> float:
    top = values.argsort(descending=True)[: round(share * len(values))]
    return float(positive[top].sum() / positive.sum())


def run_mislabels(digits: Digits, config: Mapping[str, Any]) -> dict[str, Any]:
    """Flip labels, train on them, and rank the examples.

    Args:
        digits: The data.
        config: `share` of flipped labels, `epochs`, `draws`.
    """
    labels, wrong = flipped(digits.train_y, config["share"])
    model, checkpoints = train(digits.train_x, labels, 0, config["epochs"])
    tracin = gr.TracIn(model, gr.loss(F.cross_entropy), checkpoints, show_progress=False)
    last = gr.TracIn(model, gr.loss(F.cross_entropy), checkpoints[-1:], show_progress=False)
    with torch.no_grad():
        loss = F.cross_entropy(model(digits.train_x), labels, reduction="none")
    values = {
        "TracIn self-influence": tracin.self_influence((digits.train_x, labels)),
        "gradient norm, last checkpoint": last.self_influence((digits.train_x, labels)),
        "plain loss, last checkpoint": loss,
        "random": torch.rand(len(wrong), generator=torch.Generator().manual_seed(0)),
    }
    rows = {
        name: {
            **auc(value, wrong, config["draws"]),
            "found_in_10_percent": _found(value, wrong, 0.1),
            "found_in_20_percent": _found(value, wrong, 0.2),
        }
        for name, value in values.items()
    }
    return {"flipped": int(wrong.sum()), "examples": len(wrong), "methods": rows}
