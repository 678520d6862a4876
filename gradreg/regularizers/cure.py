"""CURE: curvature along the gradient's sign, by a finite difference of gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients
from gradreg.errors import GradregError
from gradreg.penalties import MetricLike, as_metric, norm, squared_norm, under
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._points import leading_axes, like_input, own_forward, single_input
from gradreg.scalars import ScalarFunction, loss, reads_targets
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs


class CURE(Regularizer):
    r"""Squared change of the loss gradient along its sign.

    $\frac1n \sum_i \lVert \nabla_x L(x_i + h z_i) - \nabla_x L(x_i) \rVert^2$.

    $z = \mathrm{sign}(\nabla_x L) / \lVert \mathrm{sign}(\nabla_x L) \rVert$, a constant direction. For small h this is $h^2
    \lVert H z \rVert^2$. As a difference of gradients it is of second order, right with LayerNorm, and works with ReLU, where
    the exact curvature is zero. Squared as in the paper (its code takes the norm itself), not divided by h. With heads, one z
    along the sign of their mean gradient. One more forward; the gradient at x is that of the shared forward, unless the model
    draws random numbers (dropout): then both are taken with the same ones, of two forwards.

    Args:
        weight: A number or schedule, read by `Objective`.
        h: The length of the step, in units of the inputs; the paper's is 1.5 for images in [0, 1].
        of: What is differentiated; by default the cross-entropy.
        wrt: The input.
        metric: The inner product of the squared norm; see `gr.penalties.Metric`.

    Raises:
        GradregError: If h is not positive.

    Extras:
        `direction` like the input: z, taken as given.

    References:
        Moosavi-Dezfooli, Fawzi, Uesato, Frossard, "Robustness via curvature regularization, and vice versa", CVPR 2019,
        arXiv 1811.09716.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Softplus(), torch.nn.Linear(8, 2))
        >>> gr.regularizers.CURE(h=0.5)(net, (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        h: float = 1.5,
        of: ScalarFunction | None = None,
        wrt: Inputs | None = None,
        metric: MetricLike = None,
    ) -> None:
        super().__init__(weight)
        if not h > 0:
            raise GradregError(f"h={h!r}; it must be a positive length.")
        self.h = h
        self.of: ScalarFunction = loss(F.cross_entropy) if of is None else of
        self.needs_targets = reads_targets(self.of)
        self.wrt = Inputs() if wrt is None else wrt
        self.metric = as_metric(metric)

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record."""
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared change."""
        name, value = single_input(batch, self.wrt, "CURE")
        leading = leading_axes(model, self.of)
        here = {name: value} if own_forward(model, batch) else None
        first = gradients(model, batch, self.of, Inputs(name), at=here, differentiable=True)[name]
        if "direction" in batch.extras:
            z = like_input(batch, "direction", value, "CURE's z")
        else:
            behind = tuple(range(1, first.dim() - value.dim() + 1))  # heads and targets
            sign = (first.detach().mean(behind) if behind else first.detach()).sign()
            z = sign / norm(sign).to(sign).view(-1, *[1] * (value.dim() - 1))
        moved = gradients(
            model, batch, self.of, Inputs(name), at={name: value + self.h * z.to(value)}, differentiable=True
        )[name]
        return squared_norm(under(self.metric, moved - first), leading=leading).mean()

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"h={self.h}, of={self.of!r}, wrt={self.wrt!r}"
