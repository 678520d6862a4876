"""GradientNorm: flat minima by the norm of the batch's parameter gradient, exactly."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients
from gradreg.penalties import check_eps, norm, squared_norm
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._environments import check_params, heads_of
from gradreg.scalars import ScalarFunction, loss
from gradreg.schedules import Schedule
from gradreg.wrt import Params, Wrt


class GradientNorm(Regularizer):
    r"""Norm of the gradient of the mean loss of the batch, $\lVert \nabla_\theta L_B \rVert = \sqrt{\sum g^2 + \varepsilon}$.

    The exact penalty: its gradient is $H g / \lVert g \rVert$, a product with the Hessian, taken by a second reverse pass. The
    gradient is the one of this *batch*: the penalty is no mean over examples, and includes what noise small batches bring.
    `FiniteDifferenceGradientNorm` is the first-order scheme of the paper's code, and of SAM.

    With heads, the loss is averaged over heads, as the task is. In an `Objective`, the forward is the task's.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: The loss of one example; cross-entropy unless said otherwise.
        wrt: The parameters.
        squared: Return $\sum g^2$, without root or eps.
        eps: Added inside the root, in squared units of the gradient.

    Raises:
        GradregError: If `wrt` is not of parameters, or eps is not above 0.

    References:
        Zhao, Zhang, Hu, "Penalizing Gradient Norm for Efficiently Improving Generalization in Deep Learning", ICML 2022,
        arXiv 2202.03599. When it harms: arXiv 2406.09723.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> gr.regularizers.GradientNorm()(net, (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))).backward()
    """

    additive = False

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Wrt | tuple[Wrt, ...] | None = None,
        squared: bool = False,
        eps: float = 1e-12,
    ) -> None:
        super().__init__(weight)
        check_eps(eps)
        self.of: ScalarFunction = loss(F.cross_entropy) if of is None else of
        self.needs_targets = of is None
        self.wrt = check_params(Params("*") if wrt is None else wrt, "GradientNorm")
        self.squared = squared
        self.eps = eps

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall be differentiated with respect to."""
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the norm of the batch's gradient."""
        found = gradients(model, batch, self.of, self.wrt, per="batch", mean=True, differentiable=True)
        heads = heads_of(model)
        scaled = found if heads == 1 else {name: value / heads for name, value in found.items()}
        return squared_norm(scaled, leading=0) if self.squared else norm(scaled, eps=self.eps, leading=0)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}, squared={self.squared}"
