"""What the gradient penalties of critics share: the score's gradient at given points, and a look at the score itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients, output_shape
from gradreg.errors import ConstantScoreWarning, ScalarError, warn
from gradreg.model import unwrap
from gradreg.penalties import MetricLike, as_metric
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._points import floating, leading_axes, norms, single_input, squared_norms
from gradreg.scalars import ScalarFunction, projected, total
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs

# A sum of outputs whose gradient is this much smaller than that of another combination of them is constant up to rounding
_CONSTANT = 1e-4


class CriticPenalty(Regularizer):
    """Base of the penalties on the gradient of a critic's score with respect to its input."""

    def __init__(
        self,
        weight: float | Schedule,
        of: ScalarFunction | None,
        wrt: Inputs | None,
        metric: MetricLike,
        eps: float | None = None,
    ) -> None:
        super().__init__(weight)
        self.of: ScalarFunction = total() if of is None else of
        self.wrt = Inputs() if wrt is None else wrt
        self.metric = as_metric(metric)
        self.eps = eps

    def _input(self, batch: Batch) -> tuple[str, Tensor]:
        return single_input(batch, self.wrt, type(self).__name__)

    def _measured(self, model: nn.Module, batch: Batch, point: Tensor | None = None) -> Tensor:
        """Return norms (squared where there is no eps) of the score's gradients, `[n]` or `[n, K]`, at the inputs or a point."""
        name, value = self._input(batch)
        at = None if point is None else {name: point}
        found = gradients(
            model, batch, self.of, Inputs(name) if point is not None else self.wrt, at=at, differentiable=True
        )
        leading = leading_axes(model, self.of)
        if found[name].dim() != leading + value.dim() - 1:
            raise ScalarError(
                f"{type(self).__name__} needs one score per example: of={self.of!r} gives several. Use "
                "gr.scalars.total(), the sum of an example's outputs."
            )
        if self._first_call:
            check_score(type(self).__name__, model, batch, found[name], at, name)
        if self.eps is None:
            return squared_norms(found, self.metric, leading)
        return norms(found, self.metric, self.eps, leading)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}"


class AtTheInputs(CriticPenalty):
    """Base of those that look at the batch's own inputs, and so share its forward."""

    def shares(self) -> list[Share]:
        """Return what the shared forward shall record."""
        return [(self.of, self.wrt)]


def check_score(
    name: str, model: nn.Module, batch: Batch, gradient: Tensor, at: dict[str, Tensor] | None, key: str
) -> None:
    """Warn where the score's gradient is rounding noise beside that of another combination of the same outputs.

    Costs one forward and backward; done at the first call of a penalty.

    Args:
        name: How messages call the penalty.
        model: The critic.
        batch: The batch.
        gradient: The score's gradient.
        at: Where it was taken.
        key: The input.
    """
    try:
        shape = output_shape(model, batch)
    except ScalarError:
        return  # a critic whose outputs only the user's own scalar can read
    pattern = torch.arange(1.0, max(shape.numel(), 1) + 1).cos().reshape(shape).to(floating(model, batch))
    other = batch.with_extras(projections=pattern.expand(len(batch), *shape))
    reference: Any = gradients(model, other, projected("projections"), Inputs(key), at=at)[key]
    largest, own = float(reference.abs().max()), float(gradient.detach().abs().max())
    if own > _CONSTANT * largest or largest == 0:
        return
    last = [
        f"{path} ({type(module).__name__})"
        for path, module in unwrap(model).named_modules()
        if not any(module.children())
    ]
    warn(
        f"{name}: the score has a gradient of at most {own:.3g}, while another combination of the same outputs has "
        f"{largest:.3g}: their sum hardly depends on the inputs, and the penalty says nothing. A critic that ends in a "
        f"normalization (LayerNorm, softmax) has a constant sum; its last module is {last[-1] if last else 'unknown'}. "
        "End it with a Linear layer, or give the penalty another scalar (of=...).",
        ConstantScoreWarning,
    )
