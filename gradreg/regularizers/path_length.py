"""PathLength: the path length regularizer of generators."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients, output_shape
from gradreg.errors import GradregError
from gradreg.penalties import MetricLike, as_metric, check_eps, norm, precise, under
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._points import drawn, floating, leading_axes, only
from gradreg.scalars import projected
from gradreg.schedules import Schedule
from gradreg.wrt import Activations, Features, Inputs


class PathLength(Regularizer):
    r"""Distance of path lengths from their running mean.

    $\frac1n \sum_i (\lVert J_i^\top y_i \rVert - a)^2$, $y \sim N(0, I) / \sqrt{HW}$.

    J is the Jacobian of the generator's images at w: its inputs, or the activation of its mapping network
    (`wrt=gr.Activations("mapping")`). Images are `[n, C, H, W]`; for outputs `[n, d]` HW is 1. With `layers=True`, w is
    `[n, layers, d]` and the squared length is the mean over layers of the sum over d, as in StyleGAN2's code.

    a is a moving average with the given decay towards the mean length of the batch; in the penalty the batch's own step is
    already taken. It carries graph, as in the official code (`attached=True`), or is a constant. The stored average, the buffer
    `mean_length`, moves in `update()` only, which `Objective` calls.

    Args:
        weight: A number or schedule; the paper's is 2, every 4 steps: `gr.schedules.Every(4, 2.0)`.
        decay: How far the average moves towards a batch's mean length.
        attached: Whether the average in the penalty carries graph.
        layers: Whether w has an axis of layers.
        output: Which output is the image.
        wrt: w.
        metric: The inner product of gradients at w; see `gr.penalties.Metric`.
        eps: Added inside the root, in squared units of the length.

    Raises:
        GradregError: If the decay does not lie in (0, 1].

    Extras:
        `projections` like the outputs: fixed y (scaled) instead of drawn ones.

    References:
        Karras, Laine, Aittala, Hellsten, Lehtinen, Aila, "Analyzing and Improving the Image Quality of StyleGAN", 2020,
        arXiv 1912.04958, equation 4.

    Example:
        >>> import torch, gradreg as gr
        >>> generator = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Softplus(), torch.nn.Linear(8, 6))
        >>> paths = gr.regularizers.PathLength(weight=2.0)
        >>> loss, logs = gr.Objective(None, paths=paths)(generator, torch.randn(5, 3))
        >>> bool(paths.mean_length > 0)
        True
    """

    additive = False
    mean_length: Tensor

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        decay: float = 0.01,
        attached: bool = True,
        layers: bool = False,
        output: str | int | None = None,
        wrt: Inputs | Features | Activations | None = None,
        metric: MetricLike = None,
        eps: float = 1e-12,
    ) -> None:
        super().__init__(weight)
        if not 0 < decay <= 1:
            raise GradregError(f"decay={decay!r}; it must lie above 0 and at most at 1.")
        check_eps(eps)
        self.of = projected("projections", output=output)
        self.wrt = Inputs() if wrt is None else wrt
        self.decay = decay
        self.attached = attached
        self.layers = layers
        self.metric = as_metric(metric)
        self.eps = eps
        self.register_buffer("mean_length", torch.zeros(()))
        self._latest: Tensor | None = None

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record."""
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared distance."""
        lengths = self.lengths(model, batch)
        current = torch.lerp(self.mean_length.to(lengths), lengths.mean(), self.decay)
        self._latest = current.detach()
        return (lengths - (current if self.attached else current.detach())).square().mean()

    def lengths(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the path lengths, `[n]` or with heads `[n, K]`."""
        if "projections" not in batch.extras:
            shape = output_shape(model, batch, self.of.output)
            y = drawn(batch, "projections", (len(batch), *shape), floating(model, batch), "normal")
            batch = batch.with_extras(projections=y / max(1, shape[1:].numel()) ** 0.5)
        _, gradient = only(gradients(model, batch, self.of, self.wrt, differentiable=True), "PathLength")
        leading = leading_axes(model, self.of)
        if self.layers:
            if gradient.dim() != leading + 2:
                raise GradregError(
                    f"layers=True needs w of shape [n, layers, d]; the gradient is {tuple(gradient.shape)}."
                )
            gradient = precise(gradient) / gradient.shape[leading] ** 0.5
        return norm(under(self.metric, gradient), eps=self.eps, leading=leading)

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Move the stored average to that of the last penalty."""
        if self._latest is not None:
            self.mean_length.copy_(self._latest)
            self._latest = None

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"decay={self.decay}, attached={self.attached}, layers={self.layers}, wrt={self.wrt!r}"
