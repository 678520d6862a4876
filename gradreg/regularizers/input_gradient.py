"""InputGradient: double backpropagation."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients
from gradreg.penalties import MetricLike, as_metric
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._points import leading_axes, squared_norms
from gradreg.scalars import ScalarFunction, loss, reads_targets
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs, Wrt


class InputGradient(Regularizer):
    r"""Squared norm of the gradient with respect to the inputs, $\frac1n \sum_i \lVert \nabla_x L_i \rVert^2$.

    Double backpropagation. L is the loss of one example, never divided by the batch size, so the value does not depend on it.
    The gradient of a cross-entropy vanishes for examples that are fitted confidently; that of a logit does not
    (`of=gr.true_logit()`). All axes of the input count, a mean is taken over examples (and heads). No factor one half.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: What is differentiated; by default the cross-entropy. Several targets per example are summed.
        wrt: With respect to what: `Inputs()`, `Features()`, `Activations(...)`.
        metric: The inner product of gradients; see `gr.penalties.Metric`.

    References:
        Drucker, LeCun, "Improving generalization performance using double backpropagation", IEEE TNN 3(6), 1992; Ross,
        Doshi-Velez 2018, arXiv 1711.09404.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Softplus(), torch.nn.Linear(4, 2))
        >>> batch = (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
        >>> gr.regularizers.InputGradient()(net, batch).shape
        torch.Size([])
        >>> of_a_logit = gr.regularizers.InputGradient(of=gr.true_logit())
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Wrt | tuple[Wrt, ...] | None = None,
        metric: MetricLike = None,
    ) -> None:
        super().__init__(weight)
        self.of: ScalarFunction = loss(F.cross_entropy) if of is None else of
        self.needs_targets = reads_targets(self.of)
        self.wrt = Inputs() if wrt is None else wrt
        self.metric = as_metric(metric)

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record."""
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared norm."""
        found = gradients(model, batch, self.of, self.wrt, differentiable=True)
        return squared_norms(found, self.metric, leading_axes(model, self.of)).mean()

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}"
