"""The case table: one row per regularizer; tests over all of them read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import gradreg as gr


@dataclass(frozen=True)
class RegularizerCase:
    """A regularizer with a model and a batch that suit it."""

    name: str
    make: Callable[[], gr.Regularizer]
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], gr.Batch]
    invariant_to_duplicates: bool = True


def smooth_heads(count: int = 3, activation: Callable[[], nn.Module] = nn.Softplus) -> gr.SharedBase:
    """A small SharedBase in float64."""
    base = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    heads = [nn.Sequential(nn.Linear(3, 5), activation(), nn.Linear(5, 3)) for _ in range(count)]
    return gr.SharedBase(base, heads).double()


def small_batch(n: int = 4) -> gr.Batch:
    """Inputs and labels in float64."""
    return gr.Batch(torch.randn(n, 4, dtype=torch.float64), torch.randint(0, 3, (n,)))


def _diverse(**options: object) -> Callable[[], gr.Regularizer]:
    return lambda: gr.regularizers.DiverseHeads(**options)  # type: ignore[arg-type]


CASES = [
    RegularizerCase("DiverseHeads", _diverse(), smooth_heads, small_batch),
    *(
        RegularizerCase(f"DiverseHeads-{similarity}", _diverse(similarity=similarity), smooth_heads, small_batch)
        for similarity in gr.penalties.SIMILARITIES
    ),
    RegularizerCase(
        "DiverseHeads-published",
        gr.regularizers.DiverseHeads.published,
        smooth_heads,
        small_batch,
        invariant_to_duplicates=False,
    ),
    RegularizerCase(
        "DiverseHeads-ensemble",
        _diverse(wrt=gr.Inputs()),
        lambda: gr.Ensemble([nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(3)]).double(),
        small_batch,
    ),
]
