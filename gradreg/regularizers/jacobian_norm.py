"""JacobianNorm: the Frobenius norm of the input-output Jacobian, exact or by random projections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients, output_shape, targets_together
from gradreg.errors import GradregError
from gradreg.penalties import MetricLike, as_metric
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._points import drawn, floating, leading_axes, squared_norms
from gradreg.scalars import ScalarFunction, all_logits, projected
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs, Wrt

DISTRIBUTIONS = {"sphere": "sphere", "rademacher": "signs", "gaussian": "normal"}


@dataclass(frozen=True)
class JacobianEstimate:
    """Squared Frobenius norms of Jacobians, `[n]` or `[n, K]`: exact, or by projections of the outputs.

    Attributes:
        output: Which output.
        wrt: With respect to what.
        projections: Their number; None for the exact norm.
        distribution: A name of `DISTRIBUTIONS`.
    """

    output: str | int | None
    wrt: Wrt | tuple[Wrt, ...]
    projections: int | None
    distribution: str

    def __post_init__(self) -> None:
        count = self.projections
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise GradregError(f"projections={count!r}; allowed are None (exact) and integers from 1.")
        if self.distribution not in DISTRIBUTIONS:
            raise GradregError(
                f"distribution={self.distribution!r}; allowed are {', '.join(map(repr, DISTRIBUTIONS))}."
            )

    @property
    def of(self) -> ScalarFunction:
        """What is pulled back: every output, or products with vectors of the extras."""
        return (
            all_logits(output=self.output) if self.projections is None else projected("projections", output=self.output)
        )

    def __call__(self, model: nn.Module, batch: Batch, metric: MetricLike) -> Tensor:
        """Return the squared norms."""
        if self.projections is not None:
            shape = (len(batch), self.projections, *output_shape(model, batch, self.output))
            like = floating(model, batch)
            vectors = drawn(batch, "projections", shape, like, DISTRIBUTIONS[self.distribution])
            if batch.extras.get("projections") is not vectors:
                batch = batch.with_extras(projections=vectors)
        with targets_together():
            found = gradients(model, batch, self.of, self.wrt, differentiable=True)
        squares = squared_norms(found, as_metric(metric), leading_axes(model, self.of))
        return squares / (self.projections or 1)


class JacobianNorm(Regularizer):
    r"""Half the squared Frobenius norm of the Jacobian.

    $\frac1n \sum_i \frac12 \lVert J_i \rVert_F^2$, $J = \partial z / \partial x$.

    Exact: one pullback per output. By projections: $\lVert J^\top v \rVert^2$ is averaged over P random vectors with
    $E\,v v^\top = I$, one pullback each, all of one forward, and unbiased. With $A = J J^\top$ and C outputs, the variance of
    $\frac12 \lVert J^\top v \rVert^2$ for one vector is
    `gaussian` $\frac12 \lVert A \rVert_F^2$, `rademacher` $\frac12 (\lVert A \rVert_F^2 - \sum_c A_{cc}^2)$, `sphere`
    $\frac12 \frac{C}{C+2} (\lVert A \rVert_F^2 - (\mathrm{tr} A)^2 / C)$; it falls with 1/P. Vectors are drawn per example and
    shared by heads. Products are taken in reverse mode only: differentiating a forward-mode product is wrong through LayerNorm.

    The factor one half is that of the paper. A mean is taken over examples (and heads).

    Args:
        weight: A number or schedule, read by `Objective`.
        projections: The number of random vectors, P; None for the exact norm.
        distribution: `"sphere"` (uniform on the sphere of radius $\sqrt C$, the paper's choice), `"rademacher"` or `"gaussian"`.
        output: Which output to read.
        wrt: With respect to what.
        metric: The inner product of the rows of J; see `gr.penalties.Metric`.

    Raises:
        GradregError: If a setting is unknown.

    Extras:
        `projections` `[n, P, *outputs]`: fixed vectors instead of drawn ones.

    References:
        Hoffman, Roberts, Yaida, "Robust Learning with Jacobian Regularization", 2019, arXiv 1908.02729.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> exact = gr.regularizers.JacobianNorm()(net, torch.randn(5, 3))
        >>> estimate = gr.regularizers.JacobianNorm(projections=1)(net, torch.randn(5, 3))
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        projections: int | None = None,
        distribution: str = "sphere",
        output: str | int | None = None,
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
        """Return half the mean squared norm."""
        return self.estimate(model, batch, self.metric).mean() / 2

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"projections={self.estimate.projections}, distribution={self.estimate.distribution!r}, wrt={self.estimate.wrt!r}"
