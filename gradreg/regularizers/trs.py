"""TRS: ensembles with dissimilar and small loss gradients, between which adversarial examples do not transfer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import gradients, tensor_gradient
from gradreg.errors import GradregError
from gradreg.penalties import MetricLike, pairwise_alignment, squared_norm
from gradreg.regularizers._heads import HeadComparison, joined
from gradreg.regularizers._points import single_input
from gradreg.scalars import ScalarFunction
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs, Wrt


class TRS(HeadComparison):
    r"""Similarity and smoothness of loss gradients, $\frac{1}{|P|} \sum_{i<j} \lvert\cos(g_i, g_j)\rvert + s\,(g_i^2 + g_j^2)$.

    $g_i = \nabla_x L_i(x)$, the gradient of each example's own loss, and $g_i^2$ its squared norm; a mean over the pairs P and
    over examples. The smoothness term is twice the mean squared norm over models, the factor of the published code. There the
    loss is averaged over the batch first, which brings in $1/n^2$; here it is not, so s does not depend on the batch size. The
    paper's formula has unsquared norms, and their supremum over a ball; its code squares them.

    With `radius` and `steps`, the smoothness term is taken at inputs in the $\ell_\infty$ ball around the examples that make it
    large, found by steps along the sign of its gradient from the examples themselves; they carry no graph. (The code does so for
    half of the batch, from a random start.) Inputs are not clipped to a range.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: The loss of every model; cross-entropy unless said otherwise.
        wrt: What the models share: `Inputs()`, or `Features()` of a `SharedBase`.
        metric: The inner product of gradients; see `gr.penalties.Metric`.
        smoothness: s, in units of similarity per squared gradient.
        radius: Of the ball, in units of the inputs; 0 takes the examples themselves.
        steps: Ascent steps, each of length `2 * radius / steps`.
        eps: Added to squared norms inside the cosine.

    Raises:
        GradregError: If a number is out of range, or a ball is asked for and `wrt` is not one input.
        HeadsError: When called, if there is a single model.

    References:
        Yang, Li, Xu, Zuo, Chen, Rubinstein, Zhou, Zhang, Li, "TRS: Transferability Reduced Ensemble via Encouraging Gradient
        Diversity and Model Smoothness", NeurIPS 2021, arXiv 2104.00671.

    Example:
        >>> import torch, gradreg as gr
        >>> from torch import nn
        >>> model = gr.Ensemble([nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)])
        >>> gr.regularizers.TRS()(model, (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))).backward()
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Wrt | tuple[Wrt, ...] | None = None,
        metric: MetricLike = None,
        smoothness: float = 1.0,
        radius: float = 0.0,
        steps: int = 0,
        eps: float = 1e-12,
    ) -> None:
        super().__init__(weight, of=of, wrt=wrt, metric=metric, eps=eps)
        for name, value in (("smoothness", smoothness), ("radius", radius)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise GradregError(f"{name}={value!r}; it must be a finite number from 0.")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0 or (steps > 0) != (radius > 0):
            raise GradregError(f"radius={radius!r}, steps={steps!r}; give both above 0, or both 0 for the examples.")
        if steps and not isinstance(self.wrt, Inputs):
            raise GradregError(f"A ball is drawn around inputs: radius needs wrt=Inputs(), found {self.wrt!r}.")
        self.smoothness = float(smoothness)
        self.radius = float(radius)
        self.steps = steps

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return similarity plus smoothness."""
        own = self.head_gradients(model, batch)
        similarity = pairwise_alignment(own, "abs_cosine", eps=self.eps)
        if self.smoothness == 0:
            return similarity
        around = own if self.steps == 0 else self._around(model, batch)
        return similarity + self.smoothness * 2 * squared_norm(around, leading=2).mean()

    def _around(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return gradients where they are large, within the ball around the examples."""
        if not isinstance(self.wrt, Inputs):
            raise GradregError(f"TRS draws a ball around inputs, not around {self.wrt!r}.")
        name, center = single_input(batch, self.wrt, "TRS")
        center = moved = center.detach()
        for _ in range(self.steps):
            point = moved.detach().requires_grad_()
            found = gradients(model, batch, self.of, self.wrt, at={name: point}, differentiable=True)
            size = squared_norm(joined(found, self.metric), leading=2).sum()
            step = tensor_gradient(size, point).sign() * (2 * self.radius / self.steps)
            moved = torch.clamp(moved + step, center - self.radius, center + self.radius)
        found = gradients(model, batch, self.of, self.wrt, at={name: moved.detach()}, differentiable=True)
        return joined(found, self.metric)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"{super().extra_repr()}, smoothness={self.smoothness}, radius={self.radius}, steps={self.steps}"
