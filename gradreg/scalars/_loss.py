"""Losses as scalars: one value per example or token, never divided by the batch size."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.errors import ScalarError
from gradreg.scalars._outputs import (
    IGNORED_LABEL,
    check_range,
    is_causal_language_model,
    paired,
    read_outputs,
    read_targets,
)


@dataclass(frozen=True)
class Loss:
    """See `loss` and `token_loss`."""

    function: Callable[[Tensor, Any], Tensor]
    mean: bool = False
    output: str | int | None = None
    shift: bool | str = "auto"
    per_token: bool = False
    axis: int | None = None

    def check_targets(self, outputs: Any, batch: Batch) -> None:
        """Refuse labels outside the classes of the outputs, of one head or of all."""
        loss_ = self.function
        source = loss_.source if isinstance(loss_, _UnreducedModule) else getattr(loss_, "function", loss_)
        check_labels(source, read_outputs(outputs, self.output), batch.targets)

    def bind(self, model: nn.Module) -> Loss:
        """Decide whether outputs are shifted against the labels, from the model."""
        if self.shift != "auto":
            return self
        causal = is_causal_language_model(model)
        bound: dict[bool, Loss] = vars(self).setdefault("_bound", {})  # asked at every step, with the same answer
        if causal not in bound:
            bound[causal] = replace(self, shift=causal)
        return bound[causal]

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]` or `[n, *targets]`."""
        name = "token_loss()" if self.per_token else "loss()"
        predictions, targets = paired(
            outputs,
            read_targets(batch, name),
            output=self.output,
            shift=self.shift is True,
            axis=self.axis,
            elementwise=isinstance(self.function, (_Unreduced, _UnreducedModule)),
        )
        try:
            values = self.function(predictions, targets)
        except RuntimeError as problem:
            if predictions.dim() > 1 or not isinstance(targets, Tensor) or targets.is_floating_point():
                raise
            raise ScalarError(
                f"{name}: the outputs have shape {tuple(predictions.shape)}, without a class axis, for integer targets "
                f"{tuple(targets.shape)}. An unbatched example needs an axis of examples: unsqueeze(0)."
            ) from problem
        n = len(batch)
        if not isinstance(values, Tensor) or values.dim() == 0 or values.shape[0] != n:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ScalarError(
                f"{name} needs unreduced values with the example first: expected [{n}, ...], found {shape}. A loss "
                'function or module of torch is given reduction="none" for you; another callable must not reduce.'
            )
        if self.per_token:
            if values.dim() < 2:
                raise ScalarError(f"token_loss() needs one value per token, [n, tokens]; found {tuple(values.shape)}.")
            if not self.mean:
                return values
            counts = self._valid(values, targets)
            return values / (counts.view(-1, *[1] * (values.dim() - 1)) if isinstance(counts, Tensor) else counts)
        if values.dim() == 1:
            return values
        total = values.flatten(1).sum(1)
        return total / self._valid(values, targets) if self.mean else total

    def _valid(self, values: Tensor, targets: Any) -> Tensor | int:
        keywords = getattr(getattr(self.function, "function", None), "keywords", {})
        ignored = getattr(self.function, "ignore_index", keywords.get("ignore_index", IGNORED_LABEL))
        if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.shape == values.shape:
            valid: Tensor = targets != ignored
            return valid.flatten(1).sum(1).clamp(min=1)
        return values[0].numel()


def loss(
    function: Callable[..., Any],
    mean: bool = False,
    *,
    output: str | int | None = None,
    shift: bool | str = "auto",
    axis: int | None = None,
) -> Loss:
    """The loss of every example, from a loss function or module `(outputs, targets) -> values`.

    Functions that take `reduction` are called with `reduction="none"`, modules are copied with it; other callables must
    return unreduced values. An example's own axes are summed, or with `mean=True` averaged over its valid tokens (targets
    that are not ignored). Nothing is ever divided by the batch size.

    Args:
        function: For example `torch.nn.functional.cross_entropy` or `torch.nn.MSELoss()`.
        mean: Average over an example's own axes instead of summing.
        output: Which output to read.
        shift: Compare the outputs at position t with the label at t + 1, as causal language models need;
            `"auto"` does so for causal language models only.
        axis: The class axis of the outputs, where shapes do not tell it.

    Raises:
        ScalarError: If the callable fixes its own reduction, or `mean` is no flag; when called, if targets are missing or
            values come reduced.

    Example:
        >>> import torch, gradreg as gr, torch.nn.functional as F
        >>> gr.loss(F.cross_entropy)(torch.zeros(3, 2), gr.Batch(torch.zeros(3, 1), torch.tensor([0, 1, 1])))
        tensor([0.6931, 0.6931, 0.6931])
    """
    if not isinstance(mean, bool):
        raise ScalarError(f"mean={mean!r}; allowed are False (sum over an example's own axes) and True (their mean).")
    return Loss(unreduced(function), mean=mean, output=output, shift=_checked_shift(shift), axis=axis)


def token_loss(
    function: Callable[..., Any],
    *,
    output: str | int | None = None,
    shift: bool | str = "auto",
    axis: int | None = None,
) -> Loss:
    """The loss of every token, `[n, tokens]`; ignored labels (-100) give 0. With `shift`, one token fewer.

    Args:
        function: As in `loss`.
        output: Which output to read.
        shift: As in `loss`.
        axis: As in `loss`.

    Raises:
        ScalarError: As in `loss`; also when called, if there is no token axis.

    Example:
        >>> import torch, gradreg as gr, torch.nn.functional as F
        >>> batch = gr.Batch(torch.zeros(1, 3), torch.tensor([[0, 1, -100]]))
        >>> gr.token_loss(F.cross_entropy)(torch.zeros(1, 3, 2), batch)
        tensor([[0.6931, 0.6931, 0.0000]])
    """
    return Loss(unreduced(function), output=output, shift=_checked_shift(shift), per_token=True, axis=axis)


@dataclass(frozen=True)
class _Unreduced:
    """A loss function of torch with reduction="none"; equal for equal functions."""

    function: Callable[..., Any]

    def __call__(self, outputs: Tensor, targets: Any) -> Tensor:
        result: Tensor = self.function(outputs, targets, reduction="none")
        return result


@dataclass(frozen=True, eq=False)
class _UnreducedModule:
    """A loss module called with reduction="none", with the settings it has at that moment; equal for the same object."""

    source: nn.Module

    @property
    def ignore_index(self) -> int:
        return int(getattr(self.source, "ignore_index", IGNORED_LABEL))

    def __call__(self, outputs: Tensor, targets: Any) -> Tensor:
        module = copy.copy(self.source)
        vars(module)["reduction"] = "none"
        result: Tensor = module(outputs, targets)
        return result

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _UnreducedModule) and other.source is self.source

    def __hash__(self) -> int:
        return hash(id(self.source))


def unreduced(function: Callable[..., Any]) -> Callable[[Tensor, Any], Tensor]:
    """Return the loss with one value per element.

    Raises:
        ScalarError: If a partial already fixes a reduction other than "none".
    """
    if isinstance(function, (_Unreduced, _UnreducedModule)):
        return function
    if isinstance(function, nn.Module):
        return _UnreducedModule(function) if hasattr(function, "reduction") else function
    if not callable(function):
        raise ScalarError(f"loss() needs a function or module (outputs, targets) -> values, found {function!r}.")
    fixed = getattr(function, "keywords", {}).get("reduction", "none")
    if fixed != "none":
        raise ScalarError(
            f"The loss fixes reduction={fixed!r}. Per-example values are needed: leave the reduction out, it is set for you."
        )
    try:
        takes_reduction = "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins without a signature
        takes_reduction = False
    return _Unreduced(function) if takes_reduction else function


def _checked_shift(shift: bool | str) -> bool | str:
    if shift not in (True, False, "auto"):
        raise ScalarError(f'shift={shift!r}; allowed are True, False and "auto".')
    return shift


def check_labels(task: object, outputs: Any, targets: Any) -> None:
    """Refuse labels outside the classes before a classification loss of torch is called.

    Args:
        task: The loss; only cross-entropy and negative log-likelihood are looked at.
        outputs: Outputs with the classes on the last axis, of one head or of all.
        targets: Labels.

    Raises:
        ScalarError: If a label lies outside 0 ... C - 1 and is not ignored.
    """
    classification = (nn.CrossEntropyLoss, nn.NLLLoss)
    if task not in (F.cross_entropy, F.nll_loss) and not isinstance(task, classification):
        return
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and targets.dim() == 1 and outputs.dim() >= 2:
        check_range(targets, outputs.shape[-1], getattr(task, "ignore_index", IGNORED_LABEL))
