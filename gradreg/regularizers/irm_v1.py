"""IRMv1: one classifier on top of the representation that is optimal in every environment."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, output_scale_derivatives
from gradreg.errors import GradregError, ScalarError
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._environments import check_reduction, environments
from gradreg.scalars import ScalarFunction, loss
from gradreg.schedules import Schedule
from gradreg.wrt import Outputs


class IRMv1(Regularizer):
    r"""Invariant risk minimization: $\frac1E \sum_e \left( \partial_w R_e(w f) \big|_{w=1} \right)^2$.

    $R_e$ is the mean risk of environment e (a value of `batch.groups`), w a scalar that multiplies the outputs. No dummy
    variable is needed: the derivative is the mean over the environment of $\langle \partial \ell_i / \partial z_i, z_i \rangle$,
    read from the forward that the task has run anyway.

    `split=False` squares the derivative of the whole environment: never negative, biased upwards by its variance over
    batches. `split=True` multiplies those of two halves (even and odd examples of the environment, in the order of the
    batch): unbiased, but negative in nearly half of all draws at the optimum, so take no root or logarithm of it; it depends on
    the order of examples.

    The paper sums over environments; its code and DomainBed average, which is chosen here: the weight then does not depend
    on their number. The paper's code squares the whole environment and divides the *whole* loss by the weight once that exceeds
    1; DomainBed splits, does not rescale, and starts Adam anew when the weight switches on. Neither is done here. With heads,
    the penalty is averaged over heads, as the task is.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: The risk of one example; cross-entropy unless said otherwise.
        split: Use the unbiased estimate from two halves.
        reduction: `"mean"` or `"sum"` over environments.

    Raises:
        GradregError: If a name is unknown.
        BatchError: When called, if groups are missing, or an environment is too small to be split.

    References:
        Arjovsky, Bottou, Gulrajani, Lopez-Paz, "Invariant Risk Minimization", 2019, arXiv 1907.02893, section 3 (IRMv1, and the
        unbiased estimate from two minibatches).

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Linear(3, 2)
        >>> batch = gr.Batch(torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0]), groups=torch.tensor([0, 0, 0, 1, 1, 1]))
        >>> bool(gr.regularizers.IRMv1()(net, batch) >= 0)
        True
    """

    additive = False

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        split: bool = False,
        reduction: str = "mean",
    ) -> None:
        super().__init__(weight)
        if not isinstance(split, bool):
            raise GradregError(f"split={split!r}; allowed are True and False.")
        self.of: ScalarFunction = loss(F.cross_entropy) if of is None else of
        self.needs_targets = of is None
        self.split = split
        self.reduction = check_reduction(reduction)

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record."""
        return [(self.of, Outputs())]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the penalty."""
        reason = " to split it in two halves" if self.split else ""
        found = environments(batch, "IRMv1", examples=2 if self.split else 1, why=reason)
        slopes = output_scale_derivatives(model, batch, self.of)  # [n], with heads [n, K]
        if slopes.dim() > 2:
            raise ScalarError(f"IRMv1 needs one risk per example; of={self.of!r} gives several.")
        if self.split:
            even, odd = _halves(found.index)
            first, second = (environments_of(slopes, found.index, len(found), half) for half in (even, odd))
            squares = first * second
        else:
            squares = found.means(slopes).square()
        total = squares.sum() if squares.dim() == 1 else squares.mean(1).sum()
        return total / len(found) if self.reduction == "mean" else total

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, split={self.split}, reduction={self.reduction!r}"


def environments_of(values: Tensor, index: Tensor, count: int, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen rows of values `[n, ...]` over every environment."""
    weight = torch.nn.functional.one_hot(index, count).to(values) * chosen.to(values).unsqueeze(1)
    return (weight / weight.sum(0)).T @ values


def _halves(index: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of the even and the odd examples of every environment, counted in the order of the batch."""
    one_hot = torch.nn.functional.one_hot(index)
    rank = (one_hot.cumsum(0) * one_hot).sum(1) - 1
    return rank % 2 == 0, rank % 2 == 1
