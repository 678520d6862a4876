"""Accuracy of every head on every set, and the choice of a head per part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.experiments.data import IN_DISTRIBUTION, Data

__all__ = ["accuracies", "evaluate", "validation_row"]


@torch.no_grad()
def accuracies(model: nn.Module, batch: gr.Batch, chunk_size: int = 2048) -> Tensor:
    """Return the accuracy of each head, `[K]`; the model is in evaluation mode meanwhile."""
    training = model.training
    model.eval()
    try:
        correct = sum(
            (model(part.inputs).argmax(-1) == part.targets[:, None]).sum(0).cpu() for part in batch.chunks(chunk_size)
        )
    finally:
        model.train(training)
    return correct.double() / len(batch)


def validation_row(model: nn.Module, sets: Mapping[str, gr.Batch]) -> dict[str, float]:
    """Return the accuracy of the best head on each validation set, for the metrics."""
    return {f"validation/{part}": float(accuracies(model, batch).max()) for part, batch in sets.items()}


def evaluate(model: nn.Module, data: Data) -> dict[str, Any]:
    """Choose the best head for each part on validation data and report it on test data.

    This is oracle selection: the validation set of a part tells which part matters, which no training example does. It
    measures whether a good head *exists* among the K, not whether one could find it without such data.

    Returns:
        `parts` (by part: index of the chosen head, its accuracies, and the accuracies of all heads on test),
        `id_mean` and `id_best` (accuracy of the heads in distribution: mean and best), `heads` (their number).
    """
    in_distribution = accuracies(model, data.test[IN_DISTRIBUTION]) if IN_DISTRIBUTION in data.test else None
    parts = {}
    for part in data.parts:
        validation, test = accuracies(model, data.validation[part]), accuracies(model, data.test[part])
        head = int(validation.argmax())
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
