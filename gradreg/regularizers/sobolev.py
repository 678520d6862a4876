"""Sobolev: match given derivatives."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients, targets_together
from gradreg.errors import BatchError
from gradreg.penalties import MetricLike, as_metric, squared_norm, under
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._points import leading_axes, only
from gradreg.scalars import ScalarFunction, all_logits
from gradreg.schedules import Schedule
from gradreg.wrt import Activations, Features, Inputs


class Sobolev(Regularizer):
    r"""Squared distance from given derivatives, $\frac1n \sum_i \lVert \nabla_x f(x_i) - \nabla_x f^*(x_i) \rVert^2$.

    Sobolev training of first order: values are matched by the task, derivatives here. A sum over outputs and axes, a mean over
    examples (and heads). The given derivatives are constants. For many outputs, match products with random vectors, as
    the paper does: `of=gr.scalars.projected("v")` and $J^{*\top} v$ as derivatives.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: What is differentiated; by default every output.
        wrt: With respect to what.
        metric: The inner product in which the distance is taken; see `gr.penalties.Metric`.

    Raises:
        BatchError: When called, if derivatives are missing or do not fit.

    Extras:
        `derivatives` `[n, *targets, *shape]`, as `gr.gradients` gives them for the teacher; targets may be left out where
        there is one.

    References:
        Czarnecki, Osindero, Jaderberg, Swirszcz, Pascanu, "Sobolev Training for Neural Networks", 2017, arXiv 1706.04859,
        equation 1.

    Example:
        >>> import torch, torch.nn.functional as F, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> x = torch.randn(5, 1)
        >>> objective = gr.Objective(F.mse_loss, slopes=gr.regularizers.Sobolev())
        >>> loss, logs = objective(net, gr.Batch(x, targets=x.sin(), extras={"derivatives": x.cos()}))
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Inputs | Features | Activations | None = None,
        metric: MetricLike = None,
    ) -> None:
        super().__init__(weight)
        self.of: ScalarFunction = all_logits() if of is None else of
        self.wrt = Inputs() if wrt is None else wrt
        self.metric = as_metric(metric)

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record."""
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared distance."""
        given = batch.extra("derivatives", "the derivatives to match, [n, *targets, *shape]").detach()
        with targets_together():
            found = gradients(model, batch, self.of, self.wrt, differentiable=True)
        _, gradient = only(found, "Sobolev")
        leading = leading_axes(model, self.of)
        expected = (gradient.shape[0], *gradient.shape[leading:])
        if given.shape != expected:
            # one target per example: its axes may be left out
            shorter = tuple(size for size in expected[1:] if size != 1)
            if not given.is_floating_point() or tuple(size for size in given.shape[1:] if size != 1) != shorter:
                raise BatchError(
                    f"batch.extras['derivatives'] is {given.dtype} of shape {tuple(given.shape)}; the derivatives of "
                    f"of={self.of!r} are {expected}."
                )
            given = given.reshape(expected)
        if leading == 2:
            given = given.unsqueeze(1)
        return squared_norm(under(self.metric, gradient - given.to(gradient)), leading=leading).mean()

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}"
