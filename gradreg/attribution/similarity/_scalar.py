"""What is differentiated per token: the loss that suits the model, and sums of it with weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.errors import ScalarError
from gradreg.scalars import ScalarFunction, bind, loss, read_outputs, token_loss
from gradreg.scalars._loss import Loss

WEIGHTS = "gradreg.weights"


@dataclass(frozen=True)
class Weighted:
    """Sums of an example's scalars over its targets, with the weights in `batch.extras`.

    One example repeated in k rows with one-hot weights gives the gradients of k tokens by one backward.
    """

    reads_extras: ClassVar[bool] = True

    function: ScalarFunction

    def bind(self, model: nn.Module) -> Weighted:
        """Bind the scalar of the targets to the model."""
        return Weighted(bind(self.function, model))

    def check_targets(self, outputs: Any, batch: Batch) -> None:
        """Let the scalar of the targets look at them."""
        check = getattr(self.function, "check_targets", None)
        if check is not None:
            check(outputs, batch)

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]`."""
        values = self.function(outputs, batch)
        weights = batch.extra(WEIGHTS, "the weights of the targets").to(values.dtype)
        values = values.reshape(len(values), -1)
        # what has no weight may be anything, also infinite
        return (values.where(weights != 0, 0) * weights).sum(1)


def per_token(of: ScalarFunction) -> ScalarFunction:
    """Return the scalar with one value per target where it is the sum over them; others as they are."""
    return replace(of, per_token=True) if isinstance(of, Loss) and not of.per_token else of


def default_scalar(model: nn.Module, outputs: Any, batch: Batch) -> ScalarFunction:
    """Return the loss that suits a model's outputs and the labels: cross-entropy per token or example, or a squared error.

    Raises:
        ScalarError: If none does.
    """
    kind = type(model).__name__
    try:
        logits = read_outputs(outputs)
    except ScalarError as problem:
        raise ScalarError(
            f"{kind} has no output head with logits, so there is no loss to explain. Give of=, a function "
            "(outputs, batch) -> [n, targets], or a model with a head."
        ) from problem
    targets = batch.targets
    if not isinstance(targets, Tensor):
        found = "none" if targets is None else f"a {type(targets).__name__}"
        raise ScalarError(
            f"The loss of {kind} needs labels [1, ...], found {found}: put them into the batch as 'labels' (-100 where a target "
            "does not count, such as all but the masked tokens of a masked language model), or give of=."
        )
    config = getattr(model, "config", None)
    if targets.is_floating_point():
        several = getattr(config, "problem_type", None) == "multi_label_classification"
        return loss(F.binary_cross_entropy_with_logits) if several else SquaredError()
    if logits.dim() == 2 and targets.dim() == 1:
        return loss(F.cross_entropy)
    if logits.dim() == 3 and targets.shape == logits.shape[:2]:
        return token_loss(F.cross_entropy)
    raise ScalarError(
        f"{kind} gives logits {tuple(logits.shape)} for labels {tuple(targets.shape)}; known are [1, T, C] with [1, T] and "
        "[1, C] with [1]. Give of=, a function (outputs, batch) -> [n, targets]."
    )


@dataclass(frozen=True)
class SquaredError:
    """The squared error of an example, also of predictions `[n, 1]` and targets `[n]`."""

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]`."""
        predictions = read_outputs(outputs)
        targets: Tensor = batch.targets
        if targets.numel() != predictions.numel():
            raise ScalarError(
                f"Predictions {tuple(predictions.shape)} do not fit targets {tuple(targets.shape)}; give targets of their shape, "
                "or of=."
            )
        return (predictions - targets.reshape(predictions.shape)).square().reshape(len(predictions), -1).sum(1)


def shifted(of: ScalarFunction) -> bool:
    """Whether a bound scalar compares outputs with the labels one position later."""
    return isinstance(of, Loss) and of.shift is True


def one_hot_rows(positions: list[int], count: int) -> Tensor:
    """Return weights that pick one target per row, `[len(positions), count]`."""
    weights = torch.zeros(len(positions), count)
    weights[torch.arange(len(positions)), positions] = 1
    return weights
