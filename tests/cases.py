"""The case table: one row per regularizer; tests over all of them read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from tests.point_cases import ARCHITECTURES, POINT_CASES, PointCase, heads
from tests.regularizers import models


@dataclass(frozen=True)
class RegularizerCase:
    """A regularizer with a model and a batch that suit it."""

    name: str
    make: Callable[[], gr.Regularizer]
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], gr.Batch]
    invariant_to_duplicates: bool = True
    more_models: tuple[tuple[str, Callable[[], nn.Module], Callable[[], gr.Batch]], ...] = ()
    """Further models with batches, by name: derivatives are checked on all of them."""
    task: Callable[[Tensor, Tensor], Tensor] | None = F.cross_entropy
    """A task that fits the model's outputs and the batch's targets."""
    fewest: tuple[int, ...] = (0,)
    """The smallest part of the batch that the regularizer serves."""
    derivative_of_value: bool = True
    """Whether the gradient is the derivative of the value; not so for schemes that hold a direction constant."""


def _of_points(case: PointCase) -> RegularizerCase:
    first, *others = ARCHITECTURES
    more = [(other.name, other.model, lambda other=other: case.batch(other)) for other in others if case.all_models]
    if case.with_heads:
        more.append(("heads", heads, lambda: case.batch(first)))
    return RegularizerCase(
        case.name,
        case.make,
        first.model,
        lambda: case.batch(first),
        case.invariant_to_duplicates,
        tuple(more),
    )


def _of_parameters(name: str, make: Callable[[], gr.Regularizer], **options: Any) -> RegularizerCase:
    """A row for a regularizer over parameters or environments, on an MLP, a CNN and a small transformer."""
    more = tuple((other, models.MODELS[other], models.batch) for other in ("cnn", "transformer"))
    return RegularizerCase(name, make, models.mlp, models.batch, more_models=more, **options)


def _constant(make: Callable[[], gr.Batch], seed: int) -> gr.Batch:
    """The same batch at every call, without moving the random stream."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def smooth_heads(count: int = 3, activation: Callable[[], nn.Module] = nn.Softplus) -> gr.SharedBase:
    """A small SharedBase in float64."""
    base = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    heads = [nn.Sequential(nn.Linear(3, 5), activation(), nn.Linear(5, 3)) for _ in range(count)]
    return gr.SharedBase(base, heads).double()


def small_batch(n: int = 4) -> gr.Batch:
    """Inputs and labels in float64."""
    return gr.Batch(torch.randn(n, 4, dtype=torch.float64), torch.randint(0, 3, (n,)))


def _diverse(**options: object) -> Callable[[], gr.Regularizer]:
    return lambda: gr.regularizers.DiverseHeads(**options)


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
    *map(_of_points, POINT_CASES),
    *(
        RegularizerCase(
            f"{kind.__name__}{'-' + name if name != 'ensemble' else ''}",
            kind,
            models.HEADS[name],
            models.batch,
        )
        for kind in (
            gr.regularizers.LocalIndependence,
            gr.regularizers.GradientAlignmentLoss,
            gr.regularizers.TRS,
        )
        for name in ("ensemble", "shared")
    ),
    _of_parameters("IRMv1", gr.regularizers.IRMv1),
    _of_parameters("IRMv1-sum", lambda: gr.regularizers.IRMv1(reduction="sum")),
    _of_parameters("IGA", gr.regularizers.IGA, fewest=(0, 1)),
    _of_parameters("Fish", gr.regularizers.Fish, fewest=(0, 1)),
    _of_parameters("Fish-cosine", lambda: gr.regularizers.Fish(similarity="cosine"), fewest=(0, 1)),
    _of_parameters("Fishr", gr.regularizers.Fishr, fewest=(0, 1, 2, 3)),
    _of_parameters("Fishr-all", lambda: gr.regularizers.Fishr(wrt=gr.Params("*"), decay=0.9), fewest=(0, 1, 2, 3)),
    _of_parameters("GradientNorm", gr.regularizers.GradientNorm),
    _of_parameters(
        "FiniteDifferenceGradientNorm", gr.regularizers.FiniteDifferenceGradientNorm, derivative_of_value=False
    ),
    RegularizerCase(
        "GradientMatching",
        lambda: gr.regularizers.GradientMatching(real=_constant(models.batch, 7)),
        models.mlp,
        lambda: gr.Batch(torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1, 1, 2])),
        derivative_of_value=False,  # the real gradient is a constant; the derivative by the data has a test of its own
    ),
    RegularizerCase(
        "DerivativeResidual",
        lambda: gr.regularizers.DerivativeResidual(lambda d: d.derivative(0) - d.laplacian + d.u),
        lambda: nn.Sequential(nn.Linear(2, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1)).double(),
        lambda: gr.Batch(torch.rand(4, 2, dtype=torch.float64)),
        task=None,
    ),
]
