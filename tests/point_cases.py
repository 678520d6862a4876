"""Rows of the case table for penalties on gradients at inputs: each on a perceptron, a convolutional net and a transformer.

All random numbers of a penalty are given in the extras, so that two calls can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gradreg as gr

CLASSES = 3


class SmallTransformer(nn.Module):
    """One stock encoder layer, LayerNorm and default attention included."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, activation="gelu", batch_first=True)
        self.last = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.layer(x).mean(1))
        return out


@dataclass(frozen=True)
class Architecture:
    """A model by its number of outputs, and the shape of one input."""

    name: str
    make: Callable[[int], nn.Module]
    shape: tuple[int, ...]

    def model(self, outputs: int = CLASSES) -> nn.Module:
        return self.make(outputs).double()

    def inputs(self, n: int = 3) -> Tensor:
        return torch.randn(n, *self.shape, dtype=torch.float64)


PERCEPTRON = Architecture(
    "perceptron",
    lambda m: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Softplus(), nn.Linear(4, m)),
    (4,),
)
CONVOLUTIONAL = Architecture(
    "convolutional",
    lambda m: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.GELU(), nn.AvgPool2d(2), nn.Conv2d(3, 2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(2, m)
    ),
    (2, 4, 4),
)
TRANSFORMER = Architecture("transformer", SmallTransformer, (3, 4))
ARCHITECTURES = [PERCEPTRON, CONVOLUTIONAL, TRANSFORMER]

Extras = Callable[[Tensor], dict[str, Tensor]]


def like(x: Tensor, *between: int) -> Tensor:
    """Random numbers `[n, *between, *shape]`."""
    return torch.randn(x.shape[0], *between, *x.shape[1:], dtype=x.dtype)


def signs(x: Tensor, *between: int) -> Tensor:
    return like(x, *between).sign()


def rows(x: Tensor, *shape: int) -> Tensor:
    return torch.randn(x.shape[0], *shape, dtype=x.dtype)


def nothing(x: Tensor) -> dict[str, Tensor]:
    return {}


def metric(architecture: Architecture) -> gr.penalties.Metric:
    """A metric of low rank for the inputs."""
    return gr.penalties.Metric(torch.randn(torch.Size(architecture.shape).numel(), 3, dtype=torch.float64))


def heads() -> nn.Module:
    """Three heads, for the perceptron's inputs."""
    base = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
    return gr.SharedBase(
        base, [nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES)) for _ in range(3)]
    ).double()


@dataclass(frozen=True)
class PointCase:
    """A penalty and the extras it needs; `per` gives the penalty for an architecture where it depends on it."""

    name: str
    make: Callable[[], gr.Regularizer]
    extras: Extras = nothing
    invariant_to_duplicates: bool = True
    all_models: bool = True
    with_heads: bool = False

    def batch(self, architecture: Architecture, n: int = 3) -> gr.Batch:
        x = architecture.inputs(n)
        return gr.Batch(x, torch.randint(0, CLASSES, (n,)), extras=self.extras(x))


R = gr.regularizers
FAKE: Extras = lambda x: {"fake": like(x), "alpha": torch.rand(x.shape[0], dtype=x.dtype)}
REFERENCES: Extras = lambda x: {"references": like(x, 2), "alpha": torch.rand(x.shape[0], 2, dtype=x.dtype)}
PROJECTIONS: Extras = lambda x: {"projections": rows(x, 2, CLASSES)}
DELTA: Extras = lambda x: {"delta": 0.3 * like(x)}
MASK: Extras = lambda x: {"mask": like(x) > 0}

POINT_CASES = [
    PointCase("InputGradient", R.InputGradient, with_heads=True),
    PointCase("InputGradient-logit", lambda: R.InputGradient(of=gr.logit(1))),
    PointCase("InputGradient-metric", lambda: R.InputGradient(metric=metric(PERCEPTRON)), all_models=False),
    PointCase("RightForRightReasons", R.RightForRightReasons, MASK, with_heads=True),
    PointCase(
        "RightForRightReasons-sum",
        lambda: R.RightForRightReasons(reduction="sum"),
        MASK,
        invariant_to_duplicates=False,
        all_models=False,
    ),
    PointCase("RightForRightReasons-mask", lambda: R.RightForRightReasons(reduction="mask"), MASK, all_models=False),
    PointCase("JacobianNorm", R.JacobianNorm, with_heads=True),
    PointCase("JacobianNorm-projections", lambda: R.JacobianNorm(projections=2), PROJECTIONS, with_heads=True),
    PointCase("ContractivePenalty", R.ContractivePenalty),
    PointCase("WGANGP", R.WGANGP, FAKE, with_heads=True),
    PointCase("WGANGP-one-sided", lambda: R.WGANGP(one_sided=True, center=1e-3), FAKE, all_models=False),
    PointCase("WGANGP-metric", lambda: R.WGANGP(metric=metric(PERCEPTRON)), FAKE, all_models=False),
    PointCase("R1", R.R1, with_heads=True),
    PointCase("R2", R.R2, FAKE),
    PointCase("DRAGAN", R.DRAGAN, lambda x: {"noise": like(x)}),
    PointCase("PathLength", R.PathLength, lambda x: {"projections": rows(x, CLASSES)}, with_heads=True),
    PointCase("Sobolev", R.Sobolev, lambda x: {"derivatives": like(x, CLASSES)}, with_heads=True),
    PointCase("GradientSupervision", R.GradientSupervision, lambda x: {"counterfactual": like(x)}, with_heads=True),
    PointCase("AttributionPrior", R.AttributionPrior, REFERENCES, with_heads=True),
    PointCase("AttributionPrior-sparsity", lambda: R.AttributionPrior(prior="sparsity"), REFERENCES, all_models=False),
    PointCase(
        "AttributionPrior-function",
        lambda: R.AttributionPrior(prior=lambda a: a.square().flatten(1).sum(1), multiply=False),
        REFERENCES,
        all_models=False,
    ),
    PointCase("LocalLinearity", R.LocalLinearity, DELTA, with_heads=True),
    PointCase("CURE", R.CURE, with_heads=True),
    PointCase("HessianPenalty", R.HessianPenalty, lambda x: {"directions": signs(x, 3)}, with_heads=True),
    PointCase(
        "HessianPenalty-exact",
        lambda: R.HessianPenalty(exact=True, of=gr.logit(0)),
        lambda x: {"directions": signs(x, 4)},
    ),
]
