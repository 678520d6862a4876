"""Digits and a small network trained on any part of them, always from fresh, seeded weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr

__all__ = ["RATES", "Digits", "load_digits", "log_odds", "make_model", "train"]

RATES = (0.1, 0.05, 0.02)
_BATCH = 64


@dataclass(frozen=True)
class Digits:
    """Training and test examples, `x` `[n, 64]` and `y` `[n]`."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_digits(train: int = 1437, test: int = 360) -> Digits:
    """Return the digits of scikit-learn in a fixed random order, pixels from 0 to 1."""
    from sklearn.datasets import load_digits as load

    found = load()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.from_numpy(found.data).float()[order] / 16, torch.from_numpy(found.target).long()[order]
    return Digits(x[:train], y[:train], x[train : train + test], y[train : train + test])


def make_model(seed: int) -> nn.Module:
    """Return a fresh MLP 64-64-10; the global random stream is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(x: Tensor, y: Tensor, seed: int, epochs: int = 4) -> tuple[nn.Module, list[gr.Checkpoint]]:
    """Train from fresh weights by SGD, some epochs at each learning rate; return the model and a checkpoint per rate.

    The result depends on the arguments alone: nothing is left over from an earlier call.
    """
    model, generator, checkpoints = make_model(seed), torch.Generator().manual_seed(seed), []
    for rate in RATES:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(epochs):
            for rows in torch.randperm(len(x), generator=generator).split(_BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        checkpoints.append(gr.Checkpoint(model.state_dict(), learning_rate=rate))
    return model, checkpoints


def log_odds(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    r"""Return $\log \frac{p}{1-p}$ of the true class, `[n]`: the outcome that LDS and removal look at."""
    with torch.no_grad():
        logits = model(x)
    own = logits.gather(1, y[:, None])[:, 0]
    return own - logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)
