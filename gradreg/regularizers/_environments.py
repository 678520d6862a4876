"""Environments: groups of a batch whose risks or gradients are compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Share, gradients, head_count, linear_factors
from gradreg.errors import BatchError, CoupledExamplesError, GradregError
from gradreg.model import unwrap
from gradreg.penalties import factored_quadratic_form, quadratic_form
from gradreg.regularizers._base import Regularizer
from gradreg.scalars import ScalarFunction, loss
from gradreg.schedules import Schedule
from gradreg.wrt import Activations, Params, Wrt


@dataclass(frozen=True, eq=False)
class Environments:
    """The environments of a batch.

    Attributes:
        labels: The groups that occur, sorted.
        index: Position in `labels` of every example, `[n]`.
        counts: Examples of every environment.
    """

    labels: tuple[int, ...]
    index: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def means(self, values: Tensor) -> Tensor:
        """Return the mean of values `[n, ...]` over every environment, `[E, ...]`."""
        sums = values.new_zeros(len(self), *values.shape[1:]).index_add(0, self.index.to(values.device), values)
        return sums / self.counts.to(values).view(-1, *[1] * (values.dim() - 1))


def environments(batch: Batch, name: str, *, at_least: int = 1, examples: int = 1, why: str = "") -> Environments:
    """Read the environments of a batch.

    Args:
        batch: The batch.
        name: Who asks, for messages.
        at_least: How many environments are needed.
        examples: How many examples every environment needs.
        why: Why it needs them.

    Returns:
        The environments.

    Raises:
        BatchError: If groups are missing, or there are too few environments or examples.
    """
    if batch.groups is None:
        raise BatchError(
            f"{name} needs Batch.groups, the integer environment of every example: Batch(inputs, targets, groups=...)."
        )
    missing = batch.groups < 0
    if bool(missing.any()):
        raise BatchError(
            f"{int(missing.sum())} examples have a negative group (example {int(missing.nonzero()[0])}: "
            f"{int(batch.groups[missing][0])}), which usually marks a missing label. {name} needs the environment of every "
            "example, an integer from 0; leave such examples out of the batch."
        )
    labels, index, counts = batch.groups.unique(sorted=True, return_inverse=True, return_counts=True)
    found = Environments(tuple(labels.tolist()), index, counts)
    if len(found) < at_least:
        raise BatchError(
            f"{name} compares environments, but all {len(batch)} examples of the batch are of group {found.labels[0]}. Draw "
            f"batches from at least {at_least} environments."
        )
    few = int(counts.argmin())
    if int(counts[few]) < examples:
        raise BatchError(
            f"Group {found.labels[few]} has {int(counts[few])} example in this batch; {name} needs at least {examples} of every "
            f"environment{why}. Draw as many from each, or leave the group out."
        )
    return found


def environment_gradients(
    model: nn.Module, batch: Batch, of: ScalarFunction, wrt: Wrt | tuple[Wrt, ...]
) -> list[Tensor]:
    """Return the gradients of every environment's mean risk, with graph: `[E, size]` for every parameter."""
    found = gradients(model, batch, of, wrt, per="group", mean=True, differentiable=True)
    heads = heads_of(model)
    return [value.flatten(1) if heads == 1 else value.flatten(1) / heads for value in found.values()]


class EnvironmentForm(Regularizer):
    r"""Base of penalties $\sum_{ef} A_{ef}\, g_e \cdot g_f$ on the gradients of the environments' mean risks.

    Where all parameters are of linear layers and the batch is not large, products of gradients come from the layers' inputs and
    the losses' gradients at their outputs, of the forward that the task has run anyway: the cost does not depend on the
    number of environments. Otherwise every environment runs forward and backward alone, which costs one of each together.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: The risk of one example; cross-entropy unless said otherwise.
        wrt: The parameters.
    """

    additive = False

    def __init__(self, weight: float | Schedule, of: ScalarFunction | None, wrt: Wrt | tuple[Wrt, ...] | None) -> None:
        super().__init__(weight)
        self.of: ScalarFunction = loss(F.cross_entropy) if of is None else of
        self.needs_targets = of is None
        self.wrt = check_params(Params("*") if wrt is None else wrt, type(self).__name__)
        self._layers: tuple[str, ...] = ()

    def shares(self) -> Iterable[Share]:
        """Return what the shared forward shall record: the linear layers that the last call was about."""
        return [(self.of, tuple(Activations(name) for name in self._layers))] if self._layers else []

    def form(self, model: nn.Module, batch: Batch, found: Environments, matrix: Tensor) -> Tensor:
        """Return the quadratic form of the environments' gradients with a constant, symmetric matrix A, `[E, E]`."""
        try:
            factors = linear_factors(model, batch, self.of, self.wrt) if self._worthwhile(model, len(batch)) else None
        except CoupledExamplesError:
            factors = None  # examples mix behind a layer; the sum over an environment has a gradient nevertheless
        self._layers = tuple(factors or ())
        if factors is None:
            rows = environment_gradients(model, batch, self.of, self.wrt)
            return torch.stack([quadratic_form(part, matrix) for part in rows]).sum()
        member = F.one_hot(found.index, len(found)).to(matrix) / found.counts.to(matrix)
        pairs = member @ matrix @ member.T  # [n, n]
        parts = [
            factored_quadratic_form(item.inputs, item.cotangents, pairs, item.weight, item.bias)
            for item in factors.values()
        ]
        return torch.stack(parts).sum()

    def _worthwhile(self, model: nn.Module, n: int) -> bool:
        """Whether products of all pairs of examples cost less than the gradients of the environments."""
        layers = [module for module in unwrap(model).modules() if isinstance(module, nn.Linear)]
        pairs = sum(n * n * (layer.in_features + layer.out_features) for layer in layers)
        return pairs <= 2 * sum(n * layer.weight.numel() for layer in layers)


def heads_of(model: nn.Module) -> int:
    """Return the number of heads, 1 without: parameter gradients are sums over heads, risks are means over them."""
    return head_count(unwrap(model)) or 1


def check_params(wrt: object, name: str) -> tuple[Params, ...]:
    """Return descriptions of parameters as a tuple.

    Raises:
        GradregError: If something else is among them.
    """
    items = wrt if isinstance(wrt, tuple) else (wrt,)
    chosen = tuple(item for item in items if isinstance(item, Params))
    if not chosen or len(chosen) < len(items):
        raise GradregError(f'{name} differentiates with respect to parameters: wrt=Params("*"), found {wrt!r}.')
    return chosen


def check_reduction(reduction: str) -> str:
    """Return "mean" or "sum".

    Raises:
        GradregError: If it is neither.
    """
    if reduction not in ("mean", "sum"):
        raise GradregError(f"reduction={reduction!r}; allowed are 'mean' and 'sum'.")
    return reduction
