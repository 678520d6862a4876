"""Accuracy of every head on every set, and the choice of a head per part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

import gradreg as gr
from gradreg.experiments.data import IN_DISTRIBUTION, Data

__all__ = ["evaluate", "validation_row"]


def validation_row(model: nn.Module, sets: Mapping[str, gr.Batch]) -> dict[str, float]:
    """Return the accuracy of the best head on each validation set, for the metrics."""
    return {f"validation/{part}": float(gr.heads.scores(model, batch).max()) for part, batch in sets.items()}


def evaluate(model: nn.Module, data: Data) -> dict[str, Any]:
    """Choose the best head for each part on validation data and report it on test data.

    This is oracle selection: the validation set of a part tells which part matters, which no training example does. It
    measures whether a good head *exists* among the K, not whether one could find it without such data.

    Returns:
        `parts` (by part: index of the chosen head, its accuracies, and the accuracies of all heads on test),
        `id_mean` and `id_best` (accuracy of the heads in distribution: mean and best), `heads` (their number).
    """
    in_distribution = gr.heads.scores(model, data.test[IN_DISTRIBUTION]) if IN_DISTRIBUTION in data.test else None
    parts = {}
    for part in data.parts:
        chosen = gr.heads.select_oracle(model, data.validation[part])
        test = gr.heads.scores(model, data.test[part])
        head, validation = chosen.head, chosen.scores
        parts[part] = {
            "head": head,
            "validation": float(validation[head]),
            "test": float(test[head]),
            "id": None if in_distribution is None else float(in_distribution[head]),
            "test_of_all_heads": [round(float(value), 6) for value in test],
        }
    return {
        "parts": parts,
        "id_mean": None if in_distribution is None else float(in_distribution.mean()),
        "id_best": None if in_distribution is None else float(in_distribution.max()),
        "heads": len(test),
    }
