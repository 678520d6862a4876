"""RightForRightReasons: no gradient where the input must not matter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients
from gradreg.errors import BatchError, GradregError
from gradreg.penalties import MetricLike, as_metric, squared_norm
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._points import aligned, example_shape, leading_axes, only, single_input
from gradreg.scalars import ScalarFunction, total_log_probability
from gradreg.schedules import Schedule
from gradreg.wrt import Activations, Features, Inputs


class RightForRightReasons(Regularizer):
    r"""Squared input gradients where a mask says that the input must not matter.

    $\frac1n \sum_i \sum_d (A_{id}\, \partial_{x_{id}} \sum_c \log p_{ic})^2$.

    A = 1 where the input must not matter. The scalar is the sum of the log-probabilities of *all* classes, as published.
    The paper and its code sum over the batch (`reduction="sum"`), or divide that sum by the sum of the mask
    (`reduction="mask"`); the mean over examples here goes with a task that is a mean.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: What is differentiated.
        wrt: What the mask is about: an input, or features.
        reduction: `"mean"` over examples (and heads), `"sum"` over examples (mean over heads), `"mask"`: that sum divided by
            the sum of the mask.
        metric: With a metric M the mask is laid on $M^{1/2} g$, for a projection the projected gradient.

    Raises:
        GradregError: If the reduction is unknown.
        BatchError: When called, if the mask is missing or does not fit.

    Extras:
        `mask` boolean or floating point, finite, of the shape of the input; axes of length 1 are repeated.

    References:
        Ross, Hughes, Doshi-Velez, "Right for the Right Reasons", IJCAI 2017, arXiv 1703.03717, equation 1.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Softplus(), torch.nn.Linear(8, 2))
        >>> mask = torch.tensor([[True, False, False]]).expand(5, 3)  # the first feature must not matter
        >>> batch = gr.Batch(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]), extras={"mask": mask})
        >>> gr.regularizers.RightForRightReasons()(net, batch).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Inputs | Features | Activations | None = None,
        reduction: str = "mean",
        metric: MetricLike = None,
    ) -> None:
        super().__init__(weight)
        if reduction not in ("mean", "sum", "mask"):
            raise GradregError(f"reduction={reduction!r}; allowed are 'mean', 'sum' and 'mask'.")
        self.of: ScalarFunction = total_log_probability() if of is None else of
        self.wrt = Inputs() if wrt is None else wrt
        self.reduction = reduction
        self.additive = reduction != "mask"
        self.metric = as_metric(metric)

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record."""
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the reduced squares."""
        if isinstance(self.wrt, Inputs):
            single_input(batch, self.wrt, "RightForRightReasons")
        _, gradient = only(gradients(model, batch, self.of, self.wrt, differentiable=True), "RightForRightReasons")
        mask = read_mask(batch, self.wrt, gradient)
        if self.metric is not None:
            gradient = self.metric.shaped(gradient)
        squares = squared_norm(gradient * aligned(mask, gradient), leading=leading_axes(model, self.of))
        if self.reduction == "mean":
            return squares.mean()
        squares = squares.mean(1) if squares.dim() > 1 else squares
        if self.reduction == "sum":
            return squares.sum()
        size = mask.sum()
        return squares.sum() / size.where(size > 0, 1)  # an empty mask gives 0

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}, reduction={self.reduction!r}"


def read_mask(batch: Batch, wrt: Inputs | Features | Activations, gradient: Tensor) -> Tensor:
    """Return the mask `batch.extras["mask"]` in the shape of what a gradient is taken with respect to, and in its dtype.

    Raises:
        BatchError: If it is missing, neither boolean nor floating point, not finite, or does not fit the input.
    """
    mask = batch.extra("mask", "1 where the input must not matter, 0 elsewhere")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise BatchError(
            f"batch.extras['mask'] is {mask.dtype}; it must be boolean (True where the input must not matter) or floating "
            "point: convert it with mask.bool()."
        )
    shape = example_shape(batch, wrt, gradient, mask.dim(), "RightForRightReasons")
    fits = mask.dim() == len(shape) and all(own in (1, full) for own, full in zip(mask.shape, shape, strict=True))
    if not fits or mask.shape[0] != shape[0]:
        what = "input" if isinstance(wrt, Inputs) else "gradient"
        raise BatchError(
            f"batch.extras['mask'] has shape {tuple(mask.shape)}; the {what} has {shape}. Give one mask per "
            "example, of that shape or with axes of length 1."
        )
    if mask.is_floating_point() and not bool(torch.isfinite(mask).all()):
        raise BatchError("batch.extras['mask'] holds values that are not finite.")
    return mask.to(gradient).expand(shape)
