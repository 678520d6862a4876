"""Environments: groups of a batch whose risks or gradients are compared."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import gradients, head_count
from gradreg.errors import BatchError, GradregError
from gradreg.model import unwrap
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Params, Wrt


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
