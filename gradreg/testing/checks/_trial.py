"""A regularizer on copies of a model and a batch, where it can be moved about."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.batch import Batch, as_batch
from gradreg.errors import GradregError, GradregWarning
from gradreg.model import all_modules, call, copied, devices_of, preserved
from gradreg.regularizers import Regularizer
from gradreg.testing.checks._report import PropertyError

Penalty = Callable[[nn.Module, Any], Tensor]


@dataclass
class Subject:
    """What is checked. Nothing of it is ever run: every property takes a `trial` of its own."""

    regularizer: Penalty
    model: nn.Module
    batch: Batch
    reference: Penalty | None = None
    reduction: str | None = None
    additive: bool | None = None
    seed: int | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def declared(self) -> Regularizer | None:
        """The regularizer, if it is one and not just a function."""
        return self.regularizer if isinstance(self.regularizer, Regularizer) else None

    def trial(self, dtype: torch.dtype | None = torch.float64) -> Trial:
        """Return copies in this dtype (None: as they are)."""
        regularizer, model = _copy_of(self.regularizer), copied(self.model)
        batch = self.batch.map(lambda tensor: tensor.detach().clone())
        if dtype is not None:
            _cast(model, dtype)
            if isinstance(regularizer, nn.Module):
                _cast(regularizer, dtype)
            batch = batch.to(dtype=dtype)
        if isinstance(regularizer, Regularizer):
            vars(regularizer)["_first_call"] = False  # its warnings were heard once
        trial = Trial(regularizer, model, batch, self.seed)
        trial.require_grad_as(self.batch)
        return trial


@dataclass
class Trial:
    """A regularizer with a model and a batch of its own."""

    regularizer: Penalty
    model: nn.Module
    batch: Batch
    seed: int | None

    def require_grad_as(self, batch: Batch) -> None:
        """Let those inputs require grad that do in another batch."""
        for name, tensor in batch.named_inputs().items():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self.batch.named_inputs()[name].requires_grad_()

    def variables(self) -> dict[str, Tensor]:
        """Return what is trained: parameters and inputs that require grad."""
        found: dict[str, Tensor] = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for name, tensor in self.batch.named_inputs().items():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                found[f"the input {name!r}"] = tensor
        return found

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Fix the randomness, restore state afterwards, and leave out the warnings that were heard already.

        Yields:
            Nothing.
        """
        devices = devices_of(self.model)
        with ExitStack() as stack:
            stack.enter_context(preserved(self.model, devices))
            if isinstance(self.regularizer, nn.Module):
                stack.enter_context(preserved(self.regularizer, devices))
            torch.manual_seed(self.seed or 0)
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", GradregWarning)
            yield

    def value(self, batch: Batch | None = None) -> Tensor:
        """Return the penalty, with fixed randomness and without lasting effects."""
        with self.undisturbed():
            return self.regularizer(self.model, self.batch if batch is None else batch)

    def number(self, batch: Batch | None = None) -> float:
        """Return the penalty as a number."""
        return float(self.value(batch).detach())

    def gradient(self, create_graph: bool = False) -> dict[str, Tensor | None]:
        """Return the gradient of the penalty by variable, None where it is disconnected."""
        variables = self.variables()
        with self.undisturbed():
            value = self.regularizer(self.model, self.batch)
            return gradient_of(value, variables, create_graph)

    def forward(self) -> Any:
        """Run the model alone."""
        with self.undisturbed(), torch.enable_grad():
            return call(self.model, self.batch)

    def jitter(self, seed: int) -> None:
        """Move every variable a little, away from a kink."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.variables().values():
            scale = tensor.detach().abs().mean().clamp(min=0.1)
            tensor.data.add_(normal_like(tensor, generator) * 0.01 * scale)


def gradient_of(value: Tensor, variables: dict[str, Tensor], create_graph: bool = False) -> dict[str, Tensor | None]:
    """Return the gradient of a scalar by variable; None for all where it has no graph."""
    if not value.requires_grad or not variables:
        return dict.fromkeys(variables)
    found = torch.autograd.grad(
        value, list(variables.values()), create_graph=create_graph, retain_graph=create_graph, allow_unused=True
    )
    return dict(zip(variables, found, strict=True))


def normal_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal numbers, drawn on the CPU, so that no global stream moves."""
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)


def close(a: float, b: float, relative: float = 1e-8) -> bool:
    """Whether two float64 numbers agree up to rounding."""
    return abs(a - b) <= relative * max(abs(a), abs(b)) + 1e-12


def demand(holds: bool, message: str) -> None:
    """Raise if a property does not hold.

    Raises:
        PropertyError: If so.
    """
    if not holds:
        raise PropertyError(message)


def _copy_of(regularizer: Penalty) -> Penalty:
    if isinstance(regularizer, nn.Module):
        return copied(regularizer)
    try:
        return copy.deepcopy(regularizer)
    except Exception as problem:
        raise GradregError(
            f"{regularizer!r} cannot be copied ({problem}), so that it cannot be checked without changing it. Write it as a "
            "function, or as a gradreg.Regularizer whose attributes can be copied."
        ) from problem


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters, buffers, and tensors and batches that are plain attributes."""
    module.to(dtype)
    for child in all_modules(module):
        for name, value in vars(child).items():
            if isinstance(value, Batch) or (isinstance(value, Tensor) and value.is_floating_point()):
                vars(child)[name] = value.to(dtype)


def read_batch(batch: Any) -> Batch:
    """Return the batch; one of a single example cannot show what depends on the others.

    Raises:
        GradregError: If there are fewer than two examples.
    """
    found = as_batch(batch)
    if len(found) < 2:
        raise GradregError(
            "check_regularizer needs at least two examples, to see whether they are coupled; give three to eight."
        )
    return found
