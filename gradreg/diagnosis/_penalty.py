"""What can be diagnosed: a regularizer, a function of model and batch, or a pair (of, wrt)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.batch import Batch, as_batch
from gradreg.engine import gradients, has_head_axis
from gradreg.errors import BatchError, GradregError
from gradreg.model import unwrap
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Wrt, as_wrt


@dataclass
class Penalty:
    """A penalty under diagnosis.

    Attributes:
        name: How the report calls it.
        run: `(model, batch) -> scalar`.
        module: The module that holds its state, if it is one.
        given: Whether it wants the batch as the user gave it, not as a `Batch`.
    """

    name: str
    run: Callable[[nn.Module, Any], Any]
    module: nn.Module | None = None
    given: bool = False

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the value, with graph.

        Raises:
            GradregError: If it is no real scalar.
        """
        value = self.run(model, batch if self.given else as_batch(batch))
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise GradregError(f"{self.name} must return a real scalar tensor, found {found}.")
        return value.reshape(())


def as_penalty(regularizer: Any) -> Penalty:
    """Read a penalty.

    Raises:
        GradregError: If it is neither a callable nor a pair (of, wrt).
    """
    if isinstance(regularizer, (tuple, list)) and len(regularizer) == 2 and callable(regularizer[0]):
        of, wrt = regularizer
        as_wrt(wrt)  # refuses what is no description
        items = wrt if isinstance(wrt, (tuple, list)) else (wrt,)
        return Penalty(f"({', '.join([_name(of), *map(_name, items)])})", Quadratic(of, wrt))
    if type(regularizer).__module__.startswith("gradreg.scalars"):
        raise GradregError(
            f"{regularizer!r} is a scalar to differentiate, no penalty; give a pair with what it is differentiated with respect "
            "to, such as (of, gr.Inputs()), or a regularizer."
        )
    if isinstance(regularizer, nn.Module):
        return Penalty(
            _name(regularizer), _unchecked(regularizer), regularizer, not hasattr(regularizer, "needs_targets")
        )
    if callable(regularizer):
        return Penalty(_name(regularizer), regularizer, given=True)
    raise GradregError(
        f"{regularizer!r} cannot be diagnosed; give a regularizer, a function (model, batch) -> scalar, or a pair (of, wrt)."
    )


@dataclass
class Quadratic:
    r"""The generic penalty of a pair (of, wrt): $\frac1n \sum_i \sum_k |g_{ik}|^2 + \sum_{k<l} g_{ik} \cdot g_{il}$.

    Squares feel each gradient, products of pairs feel what heads share; without heads the squares remain.
    """

    of: ScalarFunction
    wrt: Wrt | tuple[Wrt, ...]

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the value."""
        found = gradients(model, batch, self.of, self.wrt, differentiable=True)
        own = {name for name, _ in unwrap(model).named_parameters()}
        heads = has_head_axis(model, batch, self.of)
        total = torch.zeros(())
        for name, gradient in found.items():
            total = total + gradient.square().sum()
            if heads and name not in own:
                total = total + (gradient.sum(1).square().sum() - gradient.square().sum()) / 2
        return total / len(batch)


def _unchecked(regularizer: nn.Module) -> Callable[[nn.Module, Any], Any]:
    """Return the call of a regularizer without the checks of its first call."""

    def run(model: nn.Module, batch: Any) -> Any:
        if getattr(regularizer, "needs_targets", False) and as_batch(batch).targets is None:
            raise BatchError(f"{type(regularizer).__name__} needs targets, but the batch has none.")
        return nn.Module.__call__(regularizer, model, batch)

    return run


def _name(thing: Any) -> str:
    if is_dataclass(thing):  # what differs from the defaults tells
        given = [f"{f.name}={value!r}" for f in fields(thing) if (value := getattr(thing, f.name)) != f.default]
        return f"{type(thing).__name__}({', '.join(given)})"
    if isinstance(thing, nn.Module):
        return type(thing).__name__
    name = getattr(thing, "__name__", type(thing).__name__)
    return "the penalty" if name == "<lambda>" else str(name)
