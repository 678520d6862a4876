"""DRAGAN: the gradient penalty around real data."""

from __future__ import annotations

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.errors import GradregError
from gradreg.penalties import MetricLike, check_eps
from gradreg.regularizers._critic import CriticPenalty
from gradreg.regularizers._points import drawn
from gradreg.scalars import ScalarFunction
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs


class DRAGAN(CriticPenalty):
    r"""Distance of the critic's gradient norm from k around real data.

    $\frac1n \sum_i (\lVert \nabla_x D(x_i + \delta_i) \rVert - k)^2$.

    The paper's formula: $\delta \sim N(0, c I)$, drawn per example; here $\sqrt c$ is `noise`, in units of the inputs. (The
    paper's notebook does something else: it interpolates towards inputs with positive, uniform noise of the batch's deviation.)
    The norm is over all axes of the input, with eps inside the root. No factor; the paper's weight is about 10.

    Args:
        weight: Lambda: a number or schedule, read by `Objective`.
        noise: Standard deviation of the perturbation.
        center: The wanted norm, k.
        of: The score; by default the sum of an example's outputs.
        wrt: The input that is meant.
        metric: The inner product of gradients; see `gr.penalties.Metric`.
        eps: Added inside the root, in squared units of the gradient.

    Raises:
        GradregError: If the noise is negative.

    Extras:
        `noise` like the input: fixed standard normal numbers instead of drawn ones; multiplied by the deviation.

    References:
        Kodali, Abernethy, Hays, Kira, "On Convergence and Stability of GANs", 2017, arXiv 1705.07215.

    Example:
        >>> import torch, gradreg as gr
        >>> critic = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Softplus(), torch.nn.Linear(8, 1))
        >>> gr.regularizers.DRAGAN(weight=10.0)(critic, torch.randn(5, 3)).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        noise: float = 0.5,
        center: float = 1.0,
        of: ScalarFunction | None = None,
        wrt: Inputs | None = None,
        metric: MetricLike = None,
        eps: float = 1e-12,
    ) -> None:
        if not noise >= 0:
            raise GradregError(f"noise={noise!r}; it is a standard deviation, from 0.")
        check_eps(eps)
        super().__init__(weight, of, wrt, metric, eps)
        self.noise = noise
        self.center = center

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared distance."""
        _, real = self._input(batch)
        point = real + self.noise * drawn(batch, "noise", real.shape, real, "normal").to(real)
        return (self._measured(model, batch, point) - self.center).square().mean()

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"noise={self.noise}, center={self.center}, {super().extra_repr()}"
