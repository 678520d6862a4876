"""ContractivePenalty: the contractive auto-encoder's penalty."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share
from gradreg.penalties import MetricLike, as_metric
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers.jacobian_norm import JacobianEstimate
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs, Wrt


class ContractivePenalty(Regularizer):
    r"""Squared Frobenius norm of the encoder's Jacobian, $\frac1n \sum_i \lVert \partial h(x_i) / \partial x \rVert_F^2$.

    A sum over the entries of the code, a mean over examples, no factor one half (as in the paper, whose sum over examples is
    divided by n here). The code is an output of the model: of an auto-encoder that returns `{"logits": ..., "code": ...}` or a
    pair, `output="code"` or `output=1`; the reconstruction is the task. For one sigmoid layer the value is
    $\sum_j (h_j (1 - h_j))^2 \sum_k W_{jk}^2$.

    Args:
        weight: A number or schedule, read by `Objective`.
        output: Which output is the code; None where the model is the encoder itself.
        projections: Random vectors instead of one pullback per entry of the code; see `JacobianNorm`.
        distribution: See `JacobianNorm`.
        wrt: With respect to what.
        metric: The inner product of the Jacobian's rows; see `gr.penalties.Metric`.

    Raises:
        GradregError: If a setting is unknown.

    Extras:
        `projections` `[n, P, *code]`: fixed vectors instead of drawn ones.

    References:
        Rifai, Vincent, Muller, Glorot, Bengio, "Contractive Auto-Encoders", ICML 2011, equation 1.

    Example:
        >>> import torch, gradreg as gr
        >>> encoder = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Sigmoid())
        >>> gr.regularizers.ContractivePenalty()(encoder, torch.randn(5, 6)).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        output: str | int | None = None,
        projections: int | None = None,
        distribution: str = "sphere",
        wrt: Wrt | tuple[Wrt, ...] | None = None,
        metric: MetricLike = None,
    ) -> None:
        super().__init__(weight)
        self.estimate = JacobianEstimate(output, Inputs() if wrt is None else wrt, projections, distribution)
        self.metric = as_metric(metric)

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record."""
        return [(self.estimate.of, self.estimate.wrt)]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared norm."""
        return self.estimate(model, batch, self.metric).mean()

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"output={self.estimate.output!r}, projections={self.estimate.projections}, wrt={self.estimate.wrt!r}"
