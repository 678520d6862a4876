"""Linear datamodeling score: do sums of scores over a random half of the data rank the outcomes of training on it?"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

import gradreg as gr
from gradreg.experiments.attribution.digits import Digits, log_odds, train

__all__ = ["lds", "outcomes_of_subsets", "random_halves", "run_lds"]


def random_halves(count: int, examples: int, seed: int = 0) -> Tensor:
    """Return masks of random halves, `[count, examples]`."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.zeros(count, examples, dtype=torch.bool)
    for mask in masks:
        mask[torch.randperm(examples, generator=generator)[: examples // 2]] = True
    return masks


def outcomes_of_subsets(
    masks: Tensor, retrainings: int, fit: Callable[[Tensor, int], Tensor], *, show_progress: bool = False
) -> Tensor:
    """Return the outcomes of training on subsets, averaged over retrainings, `[subsets, tests]`.

    Every training starts from fresh weights and has a seed of its own, made from the subset and the number of the
    retraining: the order of the subsets does not matter, and no two share the luck of one draw of weights.

    Args:
        masks: `[subsets, examples]`.
        retrainings: Per subset.
        fit: From a mask and a seed to the outcomes of all tests.
        show_progress: Show a progress bar, on terminals.
    """
    bar = tqdm(masks, desc="retraining", unit="subset", disable=None if show_progress else True)
    return torch.stack([torch.stack([fit(mask, _seed(mask, n)) for n in range(retrainings)]).mean(0) for mask in bar])


def _seed(mask: Tensor, number: int) -> int:
    digest = hashlib.sha256(mask.numpy().tobytes() + bytes([number % 256]))
    return int.from_bytes(digest.digest()[:4], "little") // 2


def lds(scores: Tensor, masks: Tensor, outcomes: Tensor, draws: int = 500, seed: int = 0) -> dict[str, float]:
    r"""Return the linear datamodeling score with a 95 % interval, over bootstrap draws of subsets and of tests.

    The mean, over tests $t$, of the Spearman correlation over subsets $S$ of $\sum_{i \in S} \mathrm{score}(t, i)$ and the
    outcome of $t$ after training on $S$.

    Args:
        scores: `[tests, examples]`; positive: the example helps.
        masks: Subsets, `[subsets, examples]`.
        outcomes: `[subsets, tests]`; larger is better.
        draws: Bootstrap draws; 0 for no interval.
        seed: Of the draws.

    Returns:
        `lds`, `low` and `high`.

    References:
        Park et al. 2023, "TRAK", arXiv 2303.14186, definition 2.3.
    """
    predicted = masks.to(scores.dtype) @ scores.T
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(draws):
        subsets = torch.randint(0, len(masks), (len(masks),), generator=generator)
        tests = torch.randint(0, scores.shape[0], (scores.shape[0],), generator=generator)
        drawn = _mean_correlation(predicted[subsets][:, tests], outcomes[subsets][:, tests])
        found += [] if math.isnan(drawn) else [drawn]  # the same subset again and again has no ranks
    value = _mean_correlation(predicted, outcomes)
    if not found:
        return {"lds": value, "low": value, "high": value}
    low, high = torch.tensor(found).quantile(torch.tensor([0.025, 0.975])).tolist()
    return {"lds": value, "low": low, "high": high}


def _mean_correlation(first: Tensor, second: Tensor) -> float:
    """Return the mean over columns of the rank correlation of two matrices `[subsets, tests]`; NaN if none has a spread."""
    ranks = torch.stack([_ranks(first.T), _ranks(second.T)])
    centered = ranks - ranks.mean(2, keepdim=True)
    norms = centered.norm(dim=2)
    return float(((centered[0] * centered[1]).sum(1) / (norms[0] * norms[1])).nanmean())


def _ranks(values: Tensor) -> Tensor:
    """Return ranks along the last axis, equal values sharing their mean rank."""
    below = (values[..., None, :] < values[..., :, None]).sum(-1)
    equal = (values[..., None, :] == values[..., :, None]).sum(-1)
    return below + (equal - 1) / 2.0


def run_lds(
    digits: Digits, methods: Mapping[str, Callable[[nn.Module, list[gr.Checkpoint]], Tensor]], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure the scores of methods on digits.

    Args:
        digits: The data.
        methods: From a trained model and its checkpoints to scores `[tests, examples]`.
        config: `subsets`, `retrainings`, `epochs`, `draws`, `progress`.
    """
    masks = random_halves(config["subsets"], len(digits.train_x))

    def fit(mask: Tensor, seed: int) -> Tensor:
        model, _ = train(digits.train_x[mask], digits.train_y[mask], seed, config["epochs"])
        return log_odds(model, digits.test_x, digits.test_y)

    outcomes = outcomes_of_subsets(masks, config["retrainings"], fit, show_progress=config["progress"])
    model, checkpoints = train(digits.train_x, digits.train_y, 0, config["epochs"])
    rows = {name: lds(method(model, checkpoints), masks, outcomes, config["draws"]) for name, method in methods.items()}
    return {"subsets": len(masks), "retrainings": config["retrainings"], "tests": len(digits.test_x), "methods": rows}
