"""IGA: environments whose risks have the same gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.regularizers._environments import EnvironmentForm, check_reduction, environments
from gradreg.scalars import ScalarFunction
from gradreg.schedules import Schedule
from gradreg.wrt import Wrt


class IGA(EnvironmentForm):
    r"""Variance of the environments' gradients, $\frac1E \sum_e \lVert g_e - \bar g \rVert^2$, $g_e = \nabla_\theta R_e$.

    $R_e$ is the mean risk of environment e (a value of `batch.groups`), averaged over heads; $\bar g$ is the mean of all $g_e$.
    This is the trace of the variance over environments of the paper; DomainBed sums over environments, E times as much
    (`reduction="sum"`). Taking the mean gradient without graph, as DomainBed does, changes nothing, since deviations from it sum
    to zero; here it keeps its graph.

    Pulling each risk back through a forward of the whole batch, as is usual, costs E backwards. Here the environments together
    cost one; see `EnvironmentForm`.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: The risk of one example; cross-entropy unless said otherwise.
        wrt: The parameters.
        reduction: `"mean"` or `"sum"` over environments.

    Raises:
        GradregError: If a name is unknown, or `wrt` is not of parameters.
        BatchError: When called, if groups are missing or there is a single one.

    References:
        Koyama, Yamaguchi, "When is invariance useful in an Out-of-Distribution Generalization problem?", 2020,
        arXiv 2008.01883 (inter-environmental gradient alignment).

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> batch = gr.Batch(torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0]), groups=torch.tensor([0, 0, 0, 1, 1, 1]))
        >>> gr.regularizers.IGA()(net, batch).backward()
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Wrt | tuple[Wrt, ...] | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(weight, of, wrt)
        self.reduction = check_reduction(reduction)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the variance of the environments' gradients."""
        found = environments(batch, "IGA", at_least=2)
        centered = torch.eye(len(found), dtype=torch.float64) - 1 / len(found)
        return self.form(model, batch, found, centered / len(found) if self.reduction == "mean" else centered)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}, reduction={self.reduction!r}"
