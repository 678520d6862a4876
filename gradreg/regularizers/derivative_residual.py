"""DerivativeResidual: losses on derivatives of outputs with respect to coordinates (physics-informed networks)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Derivatives, Share, derivatives
from gradreg.errors import GradregError
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._environments import check_reduction
from gradreg.scalars import ScalarFunction, all_logits
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs

Residual = Callable[[Derivatives], Tensor]


class DerivativeResidual(Regularizer):
    r"""Squared residual of a differential equation, $\frac1n \sum_i \lVert \mathcal{N}[u](x_i) \rVert^2$.

    The residual is a function of one object with the outputs `u`, the coordinates `x`, the `batch`, and lazily `gradient`,
    `laplacian`, `divergence` and `derivative(*axes)` of any order, for example $u_t - u_{xx}$ with inputs called x and t:

        lambda d: d.derivative("t") - d.derivative("x", "x")

    Derivatives are reverse passes through reverse passes, never a forward mode that is differentiated again (which is wrong
    through some kernels); what was computed for one is used for the others, and the Laplacian holds no Hessian. With second
    derivatives in the residual a training step is of third order and more: layer and instance normalization are written out
    for that, and BatchNorm in train mode is refused. Networks with ReLU have no second derivatives; a warning says so.

    A mean over examples, a sum over the components of a residual `[n, r]`. For energies and forces,
    $\lVert F + \nabla_x E \rVert^2$ is `lambda d: d.batch.targets + d.gradient`, a sum over coordinates.

    Args:
        weight: A number or schedule, read by `Objective`.
        residual: From derivatives to `[n]` or `[n, r]`. `Poisson` is one, as an example.
        of: The outputs: `(outputs, batch) -> [n]` or `[n, m]`; all of them unless said otherwise.
        wrt: The inputs that are coordinates, each `[n]` or `[n, d]`.
        reduction: `"mean"` or `"sum"` over examples.

    Raises:
        GradregError: If an argument is wrong; when called, if the residual has a wrong shape.
        HeadsError: When called, if the model has heads.

    References:
        Raissi, Perdikaris, Karniadakis, "Physics Informed Deep Learning (Part I)", 2017, arXiv 1711.10561.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> heat = gr.regularizers.DerivativeResidual(lambda d: d.derivative(1) - d.derivative(0, 0))  # x is 0, t is 1
        >>> heat(net, torch.rand(16, 2)).backward()
    """

    order = 3

    def __init__(
        self,
        residual: Residual,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Inputs | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(weight)
        if not callable(residual):
            raise GradregError(f"residual={residual!r} is not callable; give a function of the derivatives, d -> [n].")
        if wrt is not None and not isinstance(wrt, Inputs):
            raise GradregError(f"Coordinates are inputs: wrt=Inputs(name), found {wrt!r}.")
        self.residual = residual
        self.of: ScalarFunction = all_logits() if of is None else of
        self.wrt = Inputs() if wrt is None else wrt
        self.reduction = check_reduction(reduction)

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record."""
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the squared residual."""
        found = derivatives(model, batch, self.of, self.wrt)
        values = self.residual(found)
        if self._first_call:
            found.warn_where_flat()
        n, outputs = len(batch), found.u.shape[1] if found.u.dim() == 2 else 1
        if not isinstance(values, Tensor) or values.dim() not in (1, 2) or values.shape[0] != n:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise GradregError(f"The residual must be [n] or [n, r] for n = {n} examples, found {shape}.")
        if values.dim() == 2 and values.shape[1] == n > 1 and n not in (outputs, found.x.shape[1]):
            raise GradregError(
                f"The residual is [{n}, {n}]: [n] and [n, 1] were broadcast against each other. Outputs and derivatives of a "
                "model with one output are [n]; bring targets to that shape with squeeze(1)."
            )
        total = values.square().sum()
        return total / n if self.reduction == "mean" else total

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"residual={self.residual!r}, of={self.of!r}, wrt={self.wrt!r}, reduction={self.reduction!r}"


@dataclass(frozen=True)
class Poisson:
    r"""The residual of Poisson's equation, $-\Delta u - f$.

    Args:
        source: f, a number.

    Example:
        >>> import torch, gradreg as gr
        >>> from gradreg.regularizers.derivative_residual import Poisson
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> gr.regularizers.DerivativeResidual(Poisson(source=1.0))(net, torch.rand(16, 2)).shape
        torch.Size([])
    """

    source: float = 0.0

    def __call__(self, found: Derivatives) -> Tensor:
        """Return the residual, `[n]`."""
        return -found.laplacian - self.source
