"""HessianPenalty: a diagonal Hessian of a generator, for disentangled latents."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import curvature, point_values
from gradreg.errors import BatchError, GradregError
from gradreg.penalties import precise
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._points import drawn, leading_axes, own_forward, single_input
from gradreg.scalars import ScalarFunction, all_logits
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs


class HessianPenalty(Regularizer):
    r"""Variance of second directional derivatives.

    $\frac1n \sum_i \max_o \mathrm{Var}_v (v^\top H_{io} v)$ over Rademacher vectors v.

    For one output the variance is $2 \sum_{a \ne b} H_{ab}^2$: zero when the Hessian with respect to the latents is diagonal.
    It is estimated without bias from k vectors per example (divided by k - 1). By default $v^\top H v$ is the second difference
    $(G(z + \epsilon v) - 2 G(z) + G(z - \epsilon v)) / \epsilon^2$: no derivative inside, `order` 1, and 2k more forwards.
    `exact=True` takes second derivatives, of which training needs third ones (`order` 3); layer and instance normalization are
    written out for that, as their kernels are wrong there, and train-mode BatchNorm is refused.

    The paper takes the maximum over outputs, and its code over the batch too; here it is the maximum over an example's outputs
    and the mean over examples, or with `reduction="mean"` the mean over outputs.

    Args:
        weight: A number or schedule, read by `Objective`.
        directions: k, from 2.
        epsilon: The step of the difference, in units of the latents; the paper's code has 0.1.
        exact: Take derivatives instead of differences.
        reduction: `"max"` or `"mean"` over outputs.
        of: What is looked at; by default every output.
        wrt: The latents.

    Raises:
        GradregError: If a setting is unknown.

    Extras:
        `directions` `[n, k, *shape]`: fixed vectors instead of drawn ones.

    References:
        Peebles, Peebles, Zhu, Efros, Torralba, "The Hessian Penalty: A Weak Prior for Unsupervised Disentanglement", ECCV 2020,
        arXiv 2008.10599, equations 3 to 5.

    Example:
        >>> import torch, gradreg as gr
        >>> generator = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        >>> gr.regularizers.HessianPenalty()(generator, torch.randn(5, 3)).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        directions: int = 2,
        epsilon: float = 0.1,
        exact: bool = False,
        reduction: str = "max",
        of: ScalarFunction | None = None,
        wrt: Inputs | None = None,
    ) -> None:
        super().__init__(weight)
        if isinstance(directions, bool) or not isinstance(directions, int) or directions < 2:
            raise GradregError(f"directions={directions!r}; a variance needs at least 2.")
        if not epsilon > 0:
            raise GradregError(f"epsilon={epsilon!r}; it must be a positive step.")
        if reduction not in ("max", "mean"):
            raise GradregError(f"reduction={reduction!r}; allowed are 'max' and 'mean'.")
        self.directions = directions
        self.epsilon = epsilon
        self.exact = exact
        self.reduction = reduction
        self.of: ScalarFunction = all_logits() if of is None else of
        self.wrt = Inputs() if wrt is None else wrt
        self.order = 3 if exact else 1

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean of the largest variances."""
        name, value = single_input(batch, self.wrt, "HessianPenalty")
        count = self.directions
        if "directions" in batch.extras:
            given = batch.extra("directions", "fixed vectors")
            count = given.shape[1] if given.dim() > 1 else 0
            if count < 2:
                raise BatchError(
                    "batch.extras['directions'] holds one direction per example; a variance needs at least 2."
                )
        v = drawn(batch, "directions", (len(batch), count, *value.shape[1:]), value, "signs").to(value)
        if self.exact:
            seconds = precise(curvature(model, batch, self.of, Inputs(name), v))
        else:
            seconds = self._differences(model, batch, name, value, v)
        variances = seconds.var(-1)  # [n, (K,) *targets]
        leading = leading_axes(model, self.of)
        outputs = variances.flatten(leading) if variances.dim() > leading else variances.unsqueeze(leading)
        return (outputs.amax(-1) if self.reduction == "max" else outputs.mean(-1)).mean()

    def _differences(self, model: nn.Module, batch: Batch, name: str, value: Tensor, v: Tensor) -> Tensor:
        def at(point: Tensor | None) -> Tensor:
            places = None if point is None else {name: point}
            return precise(point_values(model, batch, self.of, Inputs(name), at=places))

        center = at(value if own_forward(model, batch) else None)
        columns = [
            (at(value + self.epsilon * one) - 2 * center + at(value - self.epsilon * one)) / self.epsilon**2
            for one in v.unbind(1)
        ]
        return torch.stack(columns, -1)

    def extra_repr(self) -> str:
        """Show the settings."""
        return (
            f"directions={self.directions}, epsilon={self.epsilon}, exact={self.exact}, reduction={self.reduction!r}, "
            f"of={self.of!r}, wrt={self.wrt!r}"
        )
