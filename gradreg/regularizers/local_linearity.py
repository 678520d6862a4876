"""LocalLinearity: the loss shall be linear around the data."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients, point_values, values_and_gradients
from gradreg.errors import GradregError, ScalarError
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._points import drawn, leading_axes, like_input, own_forward, single_input
from gradreg.scalars import ScalarFunction, loss, reads_targets
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs


class LocalLinearity(Regularizer):
    r"""The loss's largest deviation from its tangent nearby, and its slope there.

    $\frac1n \sum_i (\lvert r_i(\delta_i) \rvert + \mu \lvert \delta_i \cdot \nabla_x L_i \rvert)$.

    $r(\delta) = L(x + \delta) - L(x) - \delta \cdot \nabla_x L(x)$; $\delta$ maximizes $\lvert r \rvert$ in the cube $\lVert
    \delta \rVert_\infty \le$ `radius`, by steps along the sign of its gradient from a random start, without any graph. With
    heads one $\delta$, for the mean over heads. In the paper's notation the weight is $\lambda$ and `slope` is $\mu / \lambda$.
    Where the model draws random numbers, both losses are taken with the same ones.

    Args:
        weight: A number or schedule, read by `Objective`.
        radius: Half the side of the cube, in units of the inputs.
        steps: Steps of the maximization.
        step_size: Their length per entry; by default 2.5 radius / steps.
        slope: mu.
        of: The loss; by default the cross-entropy.
        wrt: The input.

    Raises:
        GradregError: If a setting is out of range.

    Extras:
        `delta` like the input: taken as the maximizer, without maximization. `start` like the input: where the maximization
        starts, instead of a uniform draw from the cube.

    References:
        Qin, Martens, Gowal, Krishnan, Dvijotham, Fawzi, De, Stanforth, Kohli, "Adversarial Robustness through Local
        Linearization", 2019, arXiv 1907.02610, equation 5.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Softplus(), torch.nn.Linear(8, 2))
        >>> gr.regularizers.LocalLinearity(radius=0.1)(net, (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        radius: float = 8 / 255,
        steps: int = 10,
        step_size: float | None = None,
        slope: float = 0.75,
        of: ScalarFunction | None = None,
        wrt: Inputs | None = None,
    ) -> None:
        super().__init__(weight)
        if not radius > 0 or not slope >= 0 or (step_size is not None and not step_size > 0):
            raise GradregError(
                f"radius={radius!r} and step_size={step_size!r} must be positive, slope={slope!r} at least 0."
            )
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise GradregError(f"steps={steps!r}; it must be a whole number from 1.")
        self.radius = radius
        self.steps = steps
        self.step_size = 2.5 * radius / steps if step_size is None else step_size
        self.slope = slope
        self.of: ScalarFunction = loss(F.cross_entropy) if of is None else of
        self.needs_targets = reads_targets(self.of)
        self.wrt = Inputs() if wrt is None else wrt

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record."""
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean deviation and slope."""
        name, value = single_input(batch, self.wrt, "LocalLinearity")
        if own_forward(model, batch):
            at = {name: value}
            here, found = values_and_gradients(model, batch, self.of, Inputs(name), at=at, differentiable=True)
        else:
            found = gradients(model, batch, self.of, Inputs(name), differentiable=True)
            here = point_values(model, batch, self.of, Inputs(name))
        gradient = found[name]
        if here.dim() != leading_axes(model, self.of):
            raise ScalarError(f"LocalLinearity needs one loss per example; of={self.of!r} gives {tuple(here.shape)}.")
        if "delta" in batch.extras:
            delta = like_input(batch, "delta", value, "the maximizer").detach()
        else:
            delta = self.maximizer(model, batch, here.detach(), gradient.detach())
        there = point_values(model, batch, self.of, Inputs(name), at={name: value + delta})
        slopes = _along(gradient, delta)
        return ((there - here - slopes).abs() + self.slope * slopes.abs()).mean()

    def maximizer(self, model: nn.Module, batch: Batch, here: Tensor, gradient: Tensor) -> Tensor:
        """Return the delta of the cube that maximizes the deviation, found by signed steps.

        Args:
            model: The model.
            batch: The batch.
            here: The losses at the inputs, detached.
            gradient: Their gradients, detached.
        """
        name, value = single_input(batch, self.wrt, "LocalLinearity")
        value = value.detach()
        if "start" in batch.extras:
            delta = like_input(batch, "start", value, "the start of the maximization").detach()
        else:
            delta = (2 * drawn(batch, "start", value.shape, value, "uniform").to(value) - 1) * self.radius
        for _ in range(self.steps):
            there, found = values_and_gradients(model, batch, self.of, Inputs(name), at={name: value + delta})
            moved = found[name]
            sign = (there - here - _along(gradient, delta)).sign()
            rise = sign.reshape(*sign.shape, *[1] * (value.dim() - 1)) * (moved - gradient)
            rise = rise.mean(1) if sign.dim() > 1 else rise
            delta = (delta + self.step_size * rise.sign()).clamp(-self.radius, self.radius)
        return delta

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"radius={self.radius}, steps={self.steps}, slope={self.slope}, of={self.of!r}, wrt={self.wrt!r}"


def _along(gradient: Tensor, delta: Tensor) -> Tensor:
    """Return the product of gradients `[n, (K,) *shape]` with `[n, *shape]`."""
    between = gradient.dim() - delta.dim()
    product = gradient * delta.reshape(delta.shape[0], *[1] * between, *delta.shape[1:])
    return product.flatten(1 + between).sum(1 + between)
