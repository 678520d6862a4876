"""Fishr: environments whose gradients have the same variance."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import LinearFactors, Share, gradients, linear_factors
from gradreg.errors import GradregError
from gradreg.model import unwrap
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._environments import Environments, check_params, check_reduction, environments
from gradreg.scalars import ScalarFunction, loss
from gradreg.schedules import Schedule
from gradreg.wrt import Activations, Params, Wrt


class Fishr(Regularizer):
    r"""Distance of the environments' gradient variances, $\frac1E \sum_e \lVert v_e - \bar v \rVert^2$.

    $v_e$ is the variance, entry by entry and divided by the number of examples, of the gradients of the *single examples* of
    environment e (a value of `batch.groups`) with respect to the classifier; losses are never divided by the batch size. The
    squared distance is a **sum** over entries, as in the paper's equation; DomainBed and the authors' code take the **mean** over
    all entries (`reduction="mean"`), with weights around 1000 that belong to it: the two differ by the number of parameters.

    `decay` smooths the variances over steps as the code does: with the average $a_e$ of former steps, $v_e + \frac{d}{1-d} a_e$
    stands for $v_e$, so that the gradient does not shrink with $1 - d$. $a_e \leftarrow d\,a_e + (1 - d)\,v_e$ moves in `update`
    only, which `Objective` calls once per step; it is kept per group and part of the state dict.

    For linear layers (the usual classifier) the variances are computed from the layer's inputs and the losses' gradients at its
    outputs; no per-example gradient of the weights is formed, and the forward is the task's. Other selections, and heads, take
    per-example gradients: memory of examples times parameters.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: The risk of one example; cross-entropy unless said otherwise.
        wrt: The parameters; None takes those of the model's last `nn.Linear`.
        reduction: `"sum"` or `"mean"` over entries of the gradient.
        decay: d, of the moving average (0.95 in DomainBed); None: none.

    Raises:
        GradregError: If an argument is out of range; when called, if there is no linear layer and `wrt` is None.
        BatchError: When called, if groups are missing, there is a single one, or one has a single example.

    References:
        Rame, Dancette, Cord, "Fishr: Invariant Gradient Variances for Out-of-Distribution Generalization", ICML 2022,
        arXiv 2109.02934.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> batch = gr.Batch(torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0]), groups=torch.tensor([0, 0, 0, 1, 1, 1]))
        >>> penalty = gr.regularizers.Fishr()(net, batch)  # of the last layer
        >>> everything = gr.regularizers.Fishr(wrt=gr.Params("*"))(net, batch)
        >>> bool(everything > penalty)
        True
    """

    additive = False

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Wrt | tuple[Wrt, ...] | None = None,
        reduction: str = "sum",
        decay: float | None = None,
    ) -> None:
        super().__init__(weight)
        if decay is not None and (
            not isinstance(decay, (int, float)) or not math.isfinite(decay) or not 0 <= decay < 1
        ):
            raise GradregError(f"decay={decay!r}; it must lie between 0 and 1 (1 excluded), or be None.")
        self.of: ScalarFunction = loss(F.cross_entropy) if of is None else of
        self.needs_targets = of is None
        self.wrt = None if wrt is None else check_params(wrt, "Fishr")
        self.reduction = check_reduction(reduction)
        self.decay = decay
        self._average: dict[int, Tensor] = {}
        self._found: tuple[Environments, Tensor] | None = None
        self._layers: tuple[str, ...] = ()

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record: the linear layers that the last call was about."""
        return [(self.of, tuple(Activations(name) for name in self._layers))] if self._layers else []

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the distance of the variances."""
        reason = ": the variance of one gradient is zero"
        found = environments(batch, "Fishr", at_least=2, examples=2, why=reason)
        wrt = check_params(_last_linear(model), "Fishr") if self.wrt is None else self.wrt
        factors = linear_factors(model, batch, self.of, wrt)
        self._layers = tuple(factors or ())
        if factors is not None:
            variances = torch.cat([_of_factors(item, found) for item in factors.values()], 1)
        else:
            variances = _of_gradients(gradients(model, batch, self.of, wrt, differentiable=True), found)
        self._found = (found, variances.detach())
        if self.decay:
            variances = variances + self._past(found, variances) * (self.decay / (1 - self.decay))
        squares = (variances - variances.mean(0)).square().sum(1)
        size = variances.shape[1] if self.reduction == "mean" else 1
        return squares.mean() / size

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Move the average of the environments' variances."""
        if self.decay and self._found is not None:
            found, variances = self._found
            past = self._past(found, variances)
            moved = self.decay * past + (1 - self.decay) * variances
            self._average.update(zip(found.labels, moved, strict=True))
        self._found = None

    def _past(self, found: Environments, like: Tensor) -> Tensor:
        """Return the averages so far, 0 for environments not seen yet."""
        nothing = torch.zeros_like(like[0])
        rows = [self._average.get(label, nothing).to(nothing) for label in found.labels]
        if any(row.shape != nothing.shape for row in rows):
            raise GradregError(
                "The moving average of Fishr belongs to other parameters than these; use one Fishr per model and selection."
            )
        return torch.stack(rows)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the averages for the state dict."""
        return {"average": dict(self._average)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take the averages from the state dict."""
        self._average = dict(state["average"])

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}, reduction={self.reduction!r}, decay={self.decay}"


def _of_factors(item: LinearFactors, found: Environments) -> Tensor:
    """Return variances `[E, P]` of the gradients of a linear layer, from its inputs and cotangents."""
    membership = F.one_hot(found.index, len(found)).to(item.cotangents) / found.counts.to(item.cotangents)
    parts = []
    if item.weight:
        d, h = item.cotangents, item.inputs.to(item.cotangents)
        weighted = membership.T.unsqueeze(2) * d.unsqueeze(0)  # [E, n, out]
        mean = weighted.transpose(1, 2) @ h
        square = (weighted * d).transpose(1, 2) @ h.square()
        parts.append((square - mean.square()).flatten(1))
    if item.bias:
        parts.append(_centered_square(item.cotangents, found))
    return torch.cat(parts, 1)


def _of_gradients(by_name: dict[str, Tensor], found: Environments) -> Tensor:
    return torch.cat([_centered_square(value.flatten(1), found) for value in by_name.values()], 1)


def _centered_square(rows: Tensor, found: Environments) -> Tensor:
    return found.means((rows - found.means(rows)[found.index]).square())


def _last_linear(model: nn.Module) -> Params:
    names = [name for name, module in unwrap(model).named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise GradregError(
            f'The {type(unwrap(model)).__name__} has no nn.Linear to take as classifier; name one: wrt=Params("...").'
        )
    return Params(f"{names[-1]}.*" if names[-1] else "*")
