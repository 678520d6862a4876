"""The protocol of regularizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from gradreg.batch import Batch, as_batch
from gradreg.diagnosis import first_check
from gradreg.engine import Share
from gradreg.errors import GradregError
from gradreg.schedules import Schedule, as_schedule


class Regularizer(nn.Module, ABC):
    """A differentiable penalty on gradients: `regularizer(model, batch) -> scalar`, unweighted, usable alone.

    Subclasses write `forward` and, where they can use the forward that the task needs anyway, `shares`. State moves in
    `update` only, which `Objective` calls once per training step.

    Args:
        weight: A number or a schedule; read by `Objective`, never applied here.

    Raises:
        GradregError: If the weight is negative or not finite.

    Example:
        >>> import torch, gradreg as gr
        >>> class InputGradient(gr.Regularizer):
        ...     def shares(self):
        ...         return [(gr.logit(0), gr.Inputs())]
        ...     def forward(self, model, batch):
        ...         g = gr.gradients(model, batch, gr.logit(0), gr.Inputs(), differentiable=True)["inputs"]
        ...         return g.square().sum(1).mean()
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> InputGradient(weight=0.1)(net, torch.randn(5, 3)).shape
        torch.Size([])
    """

    order: int = 2
    """The highest derivative that a training step takes: 2, or 3 where the penalty itself holds second derivatives; 1 where it
    holds none but finite differences."""
    additive: bool = True
    """Whether the value is a mean or sum of terms that each belong to one example."""
    needs_targets: bool = False
    """Whether `batch.targets` is read."""

    def __init__(self, weight: float | Schedule = 1.0) -> None:
        super().__init__()
        self.weight = as_schedule(weight)
        self._first_call = True

    def shares(self) -> Iterable[Share]:
        """Return the (of, wrt) pairs that this regularizer would like from the shared forward."""
        return ()

    @abstractmethod
    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the unweighted penalty, a scalar with graph."""

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Move state, such as a moving average. Called by `Objective` in training, after the loss was found finite."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the unweighted penalty for a `Batch` or what `as_batch` reads.

        Raises:
            GradregError: If the penalty is not a scalar; at the first call, if it cannot be trained on.
        """
        batch = as_batch(batch)
        name = type(self).__name__
        if "_first_call" not in vars(self):
            raise GradregError(f"{name}.__init__ must call super().__init__(weight).")
        if self.needs_targets and batch.targets is None:
            raise GradregError(f"{name} needs targets, but the batch has none.")
        penalty = super().__call__(model, batch)
        if not isinstance(penalty, Tensor) or penalty.dim() != 0:
            found = tuple(penalty.shape) if isinstance(penalty, Tensor) else type(penalty).__name__
            raise GradregError(f"{name} must return a scalar tensor, found {found}.")
        if self._first_call:
            first_check(name, model, batch, penalty)
            # a call under no_grad says nothing about training
            self._first_call = not penalty.requires_grad
        return penalty
