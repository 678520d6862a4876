"""The digits of scikit-learn as the studies use them: disjoint images to train, to choose by and to test on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.experiments.data.digits import digit_pools
from gradreg.experiments.reproducible import batch_indices

__all__ = ["accuracy", "digits", "epochs"]


def digits(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return images `[n, 8, 8]` from 0 to 1 and labels 0 to 9: `"train"` (half), `"validation"` and `"test"`.

    The split, stratified by digit, depends on the seed.
    """
    images, pools = digit_pools(seed)
    found = {}
    for kind, by_digit in pools.items():
        labels = np.concatenate([np.full(len(index), digit) for digit, index in by_digit.items()])
        found[kind] = (torch.from_numpy(images[np.concatenate(list(by_digit.values()))]), torch.from_numpy(labels))
    return found


def epochs(data: gr.Batch, size: int, steps: int, seed: int) -> Iterator[gr.Batch]:
    """Yield mini-batches, every epoch in a new order."""
    size = min(size, len(data))
    for step in range(steps):
        yield data[batch_indices(seed, step, len(data), size)]


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Return the share of examples whose largest output is that of the label."""
    return float((model(inputs).argmax(1) == targets).double().mean())
