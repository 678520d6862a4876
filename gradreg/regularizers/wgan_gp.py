"""WGANGP: the gradient penalty of Wasserstein GANs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.penalties import MetricLike, check_eps
from gradreg.regularizers._critic import CriticPenalty
from gradreg.regularizers._points import drawn, like_input
from gradreg.scalars import ScalarFunction
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs


class WGANGP(CriticPenalty):
    r"""Distance of the critic's gradient norm from 1 between real and generated data.

    $\frac1n \sum_i (\lVert \nabla_x D(\hat x_i) \rVert - 1)^2$.

    $\hat x_i = x_i + \alpha_i (\tilde x_i - x_i)$ with one $\alpha_i \sim U(0, 1)$ per example. The norm is over all axes of
    the input (not over channels, as in many copies), with eps inside the root, so a critic with zero gradient gives 1 and not
    NaN. No factor; the paper's weight is 10. `one_sided=True` takes $\max(0, \lVert \nabla D \rVert - 1)^2$ instead, a
    different loss.

    The critic may not hold BatchNorm in train mode, which mixes examples; it is refused. Fakes that carry a graph pass the
    penalty on to the generator; detach them in the critic's step.

    Args:
        weight: Lambda: a number or schedule, read by `Objective`.
        center: The wanted norm.
        one_sided: Whether smaller norms are free.
        of: The score; by default the sum of an example's outputs.
        wrt: The input that is meant.
        metric: The inner product of gradients; see `gr.penalties.Metric`.
        eps: Added inside the root, in squared units of the gradient.

    Raises:
        BatchError: When called, if fakes are missing or do not fit.

    Extras:
        `fake` like the input: generated data. `alpha` `[n]`: fixed numbers instead of drawn ones.

    References:
        Gulrajani, Ahmed, Arjovsky, Dumoulin, Courville, "Improved Training of Wasserstein GANs", 2017, arXiv 1704.00028,
        equation 3.

    Example:
        >>> import torch, gradreg as gr
        >>> critic = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Softplus(), torch.nn.Linear(8, 1))
        >>> batch = gr.Batch(torch.randn(5, 3), extras={"fake": torch.randn(5, 3)})
        >>> gr.regularizers.WGANGP(weight=10.0)(critic, batch).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        center: float = 1.0,
        one_sided: bool = False,
        of: ScalarFunction | None = None,
        wrt: Inputs | None = None,
        metric: MetricLike = None,
        eps: float = 1e-12,
    ) -> None:
        check_eps(eps)
        super().__init__(weight, of, wrt, metric, eps)
        self.center = center
        self.one_sided = one_sided

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared distance."""
        _, real = self._input(batch)
        fake = like_input(batch, "fake", real, "WGANGP needs generated data")
        alpha = drawn(batch, "alpha", (len(batch),), real, "uniform")
        point = torch.lerp(real, fake, alpha.to(real).view(-1, *[1] * (real.dim() - 1)))
        distance = self._measured(model, batch, point) - self.center
        return (distance.clamp(min=0) if self.one_sided else distance).square().mean()

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"center={self.center}, one_sided={self.one_sided}, {super().extra_repr()}"
