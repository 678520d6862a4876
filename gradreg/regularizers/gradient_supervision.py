"""GradientSupervision: the gradient shall point from a counterfactual to the example."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients
from gradreg.penalties import MetricLike, as_metric, check_eps, cosine, under
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._points import aligned, example_shape, leading_axes, like_input, only, single_input
from gradreg.scalars import ScalarFunction, reads_targets, true_logit
from gradreg.schedules import Schedule
from gradreg.wrt import Activations, Features, Inputs


class GradientSupervision(Regularizer):
    r"""Misalignment of the input gradient with a known direction, $\frac1n \sum_i (1 - \cos(\nabla_x f(x_i), d_i))$.

    A counterfactual $x'_i$ is the example changed just so that its label changes. Along $d_i = x_i - x'_i$ the logit of the true
    class, the default scalar, should rise. (The paper writes it with the opposite sign on both: the output shall change along
    $x' - x$ towards the other label.) Where the direction is zero, an example without a counterfactual, the term is the
    constant 1. A mean over examples (and heads), no factor.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: What is differentiated: the logit of the true class. For one logit, `gr.logit(0)` with directions of your own.
        wrt: An input, or features: directions are then given themselves.
        metric: The inner product of the cosine; see `gr.penalties.Metric`.
        eps: Added to squared norms.

    Raises:
        BatchError: When called, if directions are missing or do not fit.

    Extras:
        `direction` like the input, or `counterfactual` like the input, from which the direction is $x - x'$.

    References:
        Teney, Abbasnejad, van den Hengel, "Learning What Makes a Difference from Counterfactual Examples and Gradient
        Supervision", ECCV 2020, arXiv 2004.09034.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
        >>> batch = gr.Batch(x, y, extras={"counterfactual": torch.cat([-x[:, :1], x[:, 1:]], 1)})
        >>> gr.regularizers.GradientSupervision()(net, batch).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Inputs | Features | Activations | None = None,
        metric: MetricLike = None,
        eps: float = 1e-12,
    ) -> None:
        super().__init__(weight)
        check_eps(eps)
        self.of: ScalarFunction = true_logit() if of is None else of
        self.needs_targets = reads_targets(self.of)
        self.wrt = Inputs() if wrt is None else wrt
        self.metric = as_metric(metric)
        self.eps = eps

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record."""
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean misalignment."""
        direction = self._difference(batch)
        _, gradient = only(gradients(model, batch, self.of, self.wrt, differentiable=True), "GradientSupervision")
        leading = leading_axes(model, self.of)
        if direction is None:
            purpose = "GradientSupervision needs directions"
            axes = batch.extra("direction", purpose).dim()
            shape = example_shape(batch, self.wrt, gradient, axes, "GradientSupervision")
            direction = like_input(batch, "direction", gradient, purpose, shape)
        direction = aligned(direction.detach(), gradient)
        similarity = cosine(under(self.metric, gradient), under(self.metric, direction), eps=self.eps, leading=leading)
        return (1 - similarity).mean()

    def _difference(self, batch: Batch) -> Tensor | None:
        """Return the inputs minus their counterfactuals, None where directions themselves are given."""
        if not isinstance(self.wrt, Inputs):
            return None
        _, value = single_input(batch, self.wrt, "GradientSupervision")
        if "direction" in batch.extras:
            return None
        return value - like_input(batch, "counterfactual", value, "GradientSupervision needs counterfactuals")

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}"
