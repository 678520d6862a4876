"""DiverseHeads: heads whose gradients point in different directions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients, has_head_axis, head_factors
from gradreg.errors import GradregError, HeadsError, UnboundedPenaltyWarning, warn
from gradreg.penalties import (
    SIMILARITIES,
    MetricLike,
    as_metric,
    factored_alignment,
    factors_are_cheaper,
    pairwise_alignment,
    under,
)
from gradreg.regularizers._base import Regularizer
from gradreg.scalars import ScalarFunction, top_logit
from gradreg.schedules import Schedule
from gradreg.wrt import Features, Wrt


class DiverseHeads(Regularizer):
    r"""Alignment of the heads' gradients with respect to what they share: $\sum_{i<j} s(\nabla_h z_i, \nabla_h z_j)$.

    Trains the heads of a `SharedBase` (or the members of an `Ensemble`) to use different features. The defaults differ from
    the published form on purpose: the *centered* top logit, because adding a term to all logits of a head turns the gradient
    of its plain top logit without changing any prediction; and the *squared cosine*, because a signed dot product has no lower
    bound. A penalty of zero does not show that heads behave differently: look at their predictions.

    With piecewise-linear heads (ReLU) the heads hear of the penalty and the base gets exactly nothing; the first call
    warns.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: The scalar of every head.
        wrt: What the heads share: `Features()`, or `Inputs()` for an `Ensemble`.
        similarity: `"dot"`, `"cosine"`, `"cosine_squared"`, `"dot_squared"` or `"abs_cosine"`.
        reduction: `"mean"` or `"sum"` over pairs and examples.
        eps: Added to squared norms.
        metric: None for the plain inner product; a `gr.penalties.Metric`, a matrix M or a factor `[d, r]` to compare gradients
            by $u^\top M v$, for instance along the directions that data fill.

    Raises:
        GradregError: If a name is unknown.
        HeadsError: When called, if there is a single head.

    References:
        Teney, Abbasnejad, Lucey, van den Hengel, "Evading the Simplicity Bias: Training a Diverse Set of Models Discovers
        Solutions with Superior OOD Generalization", CVPR 2022, arXiv 2105.05612; restated in arXiv 2209.00613, equation 1.

    Example:
        >>> import torch, gradreg as gr
        >>> from torch import nn
        >>> heads = [nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 2)) for _ in range(3)]
        >>> model = gr.SharedBase(nn.Linear(6, 4), heads)
        >>> penalty = gr.regularizers.DiverseHeads()(model, torch.randn(5, 6))
        >>> penalty.backward()
        >>> bool(model.base.weight.grad.abs().sum() > 0)
        True
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Wrt | tuple[Wrt, ...] | None = None,
        similarity: str = "cosine_squared",
        reduction: str = "mean",
        eps: float = 1e-12,
        metric: MetricLike = None,
    ) -> None:
        super().__init__(weight)
        if similarity not in SIMILARITIES:
            raise GradregError(f"similarity={similarity!r}; allowed are {', '.join(map(repr, SIMILARITIES))}.")
        if reduction not in ("mean", "sum"):
            raise GradregError(f"reduction={reduction!r}; allowed are 'mean' and 'sum'.")
        self.of: ScalarFunction = top_logit(centered=True) if of is None else of
        self.wrt = Features() if wrt is None else wrt
        self.similarity = similarity
        self.reduction = reduction
        self.eps = eps
        self.metric = as_metric(metric)
        self._floor: float | None = None

    @classmethod
    def published(cls, weight: float | Schedule = 1.0) -> DiverseHeads:
        """The literal form of the paper: largest logit, signed dot product, sum over pairs and examples.

        It has no lower bound: heads that oppose each other gain by growing. A warning says so when that happens.
        """
        return cls(weight, of=top_logit(), similarity="dot", reduction="sum")

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record."""
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the alignment of the heads' gradients."""
        if self._first_call and not has_head_axis(model, batch, self.of):
            raise HeadsError(
                f"DiverseHeads compares heads, but of={self.of!r} on a {type(model).__name__} gives one value per example. Use a "
                "SharedBase or an Ensemble, with a scalar of one head's outputs."
            )
        factors = self._factors(model, batch)
        if factors is not None:
            penalty = factored_alignment(factors, self.similarity, self.reduction, self.eps)
            if self.similarity == "dot":
                self._watch(penalty)
            return penalty
        found = gradients(model, batch, self.of, self.wrt, differentiable=True)
        if len(found) == 1:
            (gradient,) = found.values()
        else:
            gradient = torch.cat([value.flatten(2) for value in found.values()], 2)
        gradient = under(self.metric, gradient)
        penalty = pairwise_alignment(gradient, self.similarity, self.reduction, self.eps)
        if self.similarity == "dot":
            if self._floor is None:
                n, heads = gradient.shape[:2]
                pairs = heads * (heads - 1) / 2
                square = float(gradient.detach().float().square().sum()) / (n * heads)  # mean squared norm at the start
                self._floor = -100 * square * (pairs * n if self.reduction == "sum" else 1)
            self._watch(penalty)
        return penalty

    def _factors(self, model: nn.Module, batch: Batch) -> list[tuple[Tensor, Tensor]] | None:
        """Return the factors of the heads' gradients where they are at hand and cheaper than the gradients."""
        if self.metric is not None or (self.similarity == "dot" and self._floor is None):
            return None  # the floor of the first call is measured on the gradients

        def worthwhile(n: int, widths: Sequence[int], features: int) -> bool:
            return factors_are_cheaper(n, widths, features, self.similarity)

        return head_factors(model, batch, self.of, self.wrt, worthwhile)

    def _watch(self, penalty: Tensor) -> None:
        """Warn once where the signed dot product falls because gradients grow, which never ends."""
        if self._floor is not None and float(penalty.detach()) < self._floor < 0:
            self._floor = float("-inf")
            warn(
                f"The heads' signed dot product fell to {float(penalty.detach()):.3g}, 100 times the squared norm "
                "of the first gradients: it has no lower bound, and heads that oppose each other gain by growing. Use "
                'similarity="cosine_squared", a smaller weight, or stop early.',
                UnboundedPenaltyWarning,
            )

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}, similarity={self.similarity!r}, reduction={self.reduction!r}"
