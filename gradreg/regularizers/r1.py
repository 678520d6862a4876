"""R1: the gradient penalty on real data."""

from __future__ import annotations

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.penalties import MetricLike
from gradreg.regularizers._critic import AtTheInputs
from gradreg.scalars import ScalarFunction
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs


class R1(AtTheInputs):
    r"""Half the squared gradient of the critic at real data, $\frac1n \sum_i \frac12 \lVert \nabla_x D(x_i) \rVert^2$.

    The inputs of the batch are the real data. The factor one half is that of the paper, $\frac{\gamma}{2} E \lVert \nabla D
    \rVert^2$, and of StyleGAN2; the paper's own code multiplies by gamma without it. A squared norm over all axes of the input:
    no root, no eps. For the lazy form of StyleGAN2, every 16 steps and multiplied by 16, the weight is `gr.schedules.Every(16,
    gamma)`.

    Args:
        weight: Gamma: a number or schedule, read by `Objective`.
        of: The score; by default the sum of an example's outputs, which serves `[n]`, `[n, 1]` and patches.
        wrt: The input that is meant.
        metric: The inner product of gradients; see `gr.penalties.Metric`.

    Raises:
        BatchError: When called, if the input is no batch of floating-point tensors.

    References:
        Mescheder, Geiger, Nowozin, "Which Training Methods for GANs do actually Converge?", ICML 2018, arXiv 1801.04406,
        equation 9; lazily: Karras et al. 2020, arXiv 1912.04958.

    Example:
        >>> import torch, gradreg as gr
        >>> critic = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Softplus(), torch.nn.Linear(8, 1))
        >>> lazily = gr.schedules.Every(16, weight=10.0)
        >>> objective = gr.Objective(None, r1=gr.regularizers.R1(weight=lazily))
        >>> loss, logs = objective(critic, torch.randn(5, 3))
        >>> logs["r1/weight"]
        160.0
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Inputs | None = None,
        metric: MetricLike = None,
    ) -> None:
        super().__init__(weight, of, wrt, metric)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return half the mean squared norm."""
        return self._measured(model, batch).mean() / 2
