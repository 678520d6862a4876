"""R2: the gradient penalty on generated data."""

from __future__ import annotations

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.penalties import MetricLike
from gradreg.regularizers._critic import CriticPenalty
from gradreg.regularizers._points import like_input
from gradreg.scalars import ScalarFunction
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs


class R2(CriticPenalty):
    r"""Half the squared gradient of the critic at generated data.

    $\frac1n \sum_i \frac12 \lVert \nabla_x D(\tilde x_i) \rVert^2$.

    As `R1`, at fakes: one more forward. Fakes that carry a graph pass the penalty on to the generator; detach them in the
    critic's step.

    Args:
        weight: Gamma: a number or schedule, read by `Objective`.
        of: The score; by default the sum of an example's outputs.
        wrt: The input that is meant.
        metric: The inner product of gradients; see `gr.penalties.Metric`.

    Raises:
        BatchError: When called, if fakes are missing or do not fit.

    Extras:
        `fake` like the input: generated data.

    References:
        Mescheder, Geiger, Nowozin, "Which Training Methods for GANs do actually Converge?", ICML 2018, arXiv 1801.04406,
        equation 10.

    Example:
        >>> import torch, gradreg as gr
        >>> critic = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Softplus(), torch.nn.Linear(8, 1))
        >>> batch = gr.Batch(torch.randn(5, 3), extras={"fake": torch.randn(5, 3)})
        >>> gr.regularizers.R2()(critic, batch).shape
        torch.Size([])
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
        fake = like_input(batch, "fake", self._input(batch)[1], "R2 needs generated data")
        return self._measured(model, batch, fake).mean() / 2
