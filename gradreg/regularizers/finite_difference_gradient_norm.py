"""FiniteDifferenceGradientNorm: the first-order scheme for the gradient norm, of which SAM is a special case."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients, point_values
from gradreg.errors import GradregError
from gradreg.model import unwrap
from gradreg.penalties import check_eps, norm
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._environments import check_params
from gradreg.scalars import ScalarFunction, loss
from gradreg.schedules import Schedule
from gradreg.wrt import Params, Wrt


class FiniteDifferenceGradientNorm(Regularizer):
    r"""A difference of losses that trains as the gradient norm, $\frac{L(\theta + r\,\hat g) - L(\theta)}{r}$, $\hat g$ constant.

    $\hat g = g / \lVert g \rVert$ is the direction of the batch's gradient, *without* graph. The value tends to
    $\lVert \nabla_\theta L_B \rVert$ as $r \to 0$, and its gradient $(g(\theta + r \hat g) - g(\theta)) / r$ to that of
    `GradientNorm`, $H \hat g$, with error $O(r)$. Because $\hat g$ is held constant, the gradient is not the exact derivative of
    the value.

    **SAM.** Loss plus $\lambda$ times this penalty has the gradient $(1 - \alpha)\,g(\theta) + \alpha\,g(\theta + r \hat g)$ with
    $\alpha = \lambda / r$: the scheme of the paper and its code. `weight = radius` is exactly sharpness-aware minimization, and a
    smaller weight a mixture of SAM and plain descent. No derivative of a gradient is taken.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: The loss of one example; cross-entropy unless said otherwise.
        wrt: The parameters that are moved.
        radius: r, the length of the step in parameter space.
        eps: Added inside the root of the norm.

    Raises:
        GradregError: If `wrt` is not of parameters, or radius or eps are not above 0.

    References:
        Zhao, Zhang, Hu 2022, arXiv 2202.03599; Foret, Kleiner,
        Mobahi, Neyshabur 2021, arXiv 2010.01412 (SAM).

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> batch = gr.Batch(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
        >>> near = gr.regularizers.FiniteDifferenceGradientNorm(radius=1e-3)(net, batch)
        >>> torch.allclose(near, gr.regularizers.GradientNorm()(net, batch), rtol=1e-2)
        True
    """

    order = 1
    additive = False

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Wrt | tuple[Wrt, ...] | None = None,
        radius: float = 0.05,
        eps: float = 1e-12,
    ) -> None:
        super().__init__(weight)
        check_eps(eps)
        if not isinstance(radius, (int, float)) or not 0 < radius < float("inf"):
            raise GradregError(f"radius={radius!r}; it must be a positive, finite number.")
        self.of: ScalarFunction = loss(F.cross_entropy) if of is None else of
        self.needs_targets = of is None
        self.wrt = check_params(Params("*") if wrt is None else wrt, "FiniteDifferenceGradientNorm")
        self.radius = float(radius)
        self.eps = eps

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall be differentiated with respect to."""
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the difference of the two losses over the radius."""
        found = gradients(model, batch, self.of, self.wrt, per="batch", mean=True, differentiable=False)
        step = self.radius / norm(found, eps=self.eps, leading=0)
        named = dict(unwrap(model).named_parameters())
        moved = {name: named[name] + step * value for name, value in found.items()}
        there = point_values(model, batch, self.of, self.wrt, at=moved).mean()
        here = point_values(model, batch, self.of, self.wrt).mean()
        return (there - here) / self.radius

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}, radius={self.radius}"
