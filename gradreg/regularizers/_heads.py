"""What penalties that compare the heads of a model share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients, has_head_axis
from gradreg.errors import HeadsError
from gradreg.penalties import MetricLike, as_metric, check_eps, under
from gradreg.regularizers._base import Regularizer
from gradreg.scalars import ScalarFunction, loss
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs, Wrt


class HeadComparison(Regularizer):
    """A penalty on gradients of several heads or models with respect to what they share.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: The scalar of every head; cross-entropy unless said otherwise.
        wrt: What the heads share: `Inputs()`, or `Features()` of a `SharedBase`.
        metric: The inner product of gradients; see `gr.penalties.Metric`.
        eps: Added to squared norms.
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Wrt | tuple[Wrt, ...] | None = None,
        metric: MetricLike = None,
        eps: float = 1e-12,
    ) -> None:
        super().__init__(weight)
        check_eps(eps)
        self.of: ScalarFunction = loss(F.cross_entropy) if of is None else of
        self.needs_targets = of is None
        self.wrt = Inputs() if wrt is None else wrt
        self.metric = as_metric(metric)
        self.eps = eps

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record."""
        return [(self.of, self.wrt)]

    def head_gradients(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the gradients of all heads, `[n, K, d]` as the metric sees them.

        Raises:
            HeadsError: If there is a single head, or none.
        """
        if self._first_call:
            check_heads(model, batch, self.of, type(self).__name__)
        return joined(gradients(model, batch, self.of, self.wrt, differentiable=True), self.metric)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}"


def check_heads(model: nn.Module, batch: Batch, of: ScalarFunction, name: str) -> None:
    """Refuse models without heads.

    Raises:
        HeadsError: If scalars have no axis of heads.
    """
    if not has_head_axis(model, batch, of):
        raise HeadsError(
            f"{name} compares heads, but of={of!r} on a {type(model).__name__} gives one value per example. Use a SharedBase or "
            "an Ensemble, with a scalar of one head's outputs."
        )


def joined(found: Mapping[str, Tensor], metric: MetricLike = None) -> Tensor:
    """Return the gradients of all keys as one, `[n, K, d]`."""
    if len(found) == 1:
        return under(as_metric(metric), next(iter(found.values())))
    return under(as_metric(metric), torch.cat([value.flatten(2) for value in found.values()], 2))
