"""A penalty as a function of a model's parameters, evaluated as often as one likes without a trace."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradreg.batch import Batch, as_batch, map_tensors
from gradreg.diagnosis._penalty import Penalty
from gradreg.engine import Record, grad_mode, parameter_gradients, recorded
from gradreg.errors import GradregWarning
from gradreg.model import (
    all_modules,
    call,
    devices_of,
    preserved_attributes,
    preserved_random_state,
    swapped,
    unwrap,
    walk,
)


class Trial:
    """Evaluations of a penalty on copies of parameters, buffers and batch, put in place for the time of each.

    The model itself is never copied, since some models cannot be (old weight normalization after a forward), and left as it
    was. All evaluations draw the same random numbers.

    Args:
        model: The model as the user calls it.
        batch: The batch as the user gave it.
        penalty: The penalty.
        dtype: Precision of the copies; None keeps each tensor's own.
    """

    def __init__(self, model: nn.Module, batch: Any, penalty: Penalty, dtype: torch.dtype | None) -> None:
        self.model, self.inner, self.penalty, self.dtype = model, unwrap(model), penalty, dtype
        self.notes: list[str] = []
        self.through_wrapper = 0
        self.calm: list[nn.Module] = []
        """Modules that evaluations put in eval mode."""
        with grad_mode():
            self.batch = batch.map(self._data) if isinstance(batch, Batch) else map_tensors(self._data, batch)
            self.start = {name: self._copy(p) for name, p in self.inner.named_parameters()}
        self.trained = [name for name, parameter in self.inner.named_parameters() if parameter.requires_grad]

    def shifted(self, direction: Mapping[str, Tensor], step: float) -> float:
        """Return the penalty after a step of the parameters along a direction."""
        with self.placed({name: self.start[name] + step * value for name, value in direction.items()}):
            return float(self.penalty(self.model, self.batch).detach())

    def gradients(self) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Return the penalty and its gradient at every trainable parameter, None where there is none."""
        with self.placed({}):
            value = self.penalty(self.model, self.batch)
            return value, parameter_gradients(value, self.inner)

    def moving(self) -> dict[str, nn.Module]:
        """Return the modules in train mode whose forward changes buffers on which their outputs depend, by name."""
        with self.placed({}):
            before = [
                (name, module, part, part.clone()) for name, module in walk(self.inner) for part in _buffers(module)
            ]
            with suppress(Exception):
                self.penalty(self.model, self.batch)
            moved = {name: module for name, module, part, old in before if not torch.equal(part, old)}
        return {name: module for name, module in moved.items() if module.training}

    def first_order(self) -> dict[str, Tensor | None]:
        """Return the gradient of the outputs, summed, at every trainable parameter; empty where they give none."""
        try:
            with self.placed({}):
                outputs = call(self.inner, as_batch(self.batch))
                leaves = [leaf for leaf in pytree.tree_leaves(_plain(outputs)) if isinstance(leaf, Tensor)]
                parts = [leaf.sum() for leaf in leaves if leaf.is_floating_point()]
                return parameter_gradients(torch.stack(parts).sum(), self.inner) if parts else {}
        except Exception:  # a model that the penalty calls in a way of its own; the size is then unknown
            return {}

    @contextmanager
    def observed(self) -> Iterator[tuple[Record, dict[int, str]]]:
        """Run the penalty once, recorded, and stay in place, so that operations can be run again inside.

        Yields:
            The record, complete up to where the penalty raised if it did, and the names of the parameters by id.
        """
        with self.placed({}):
            names = {id(parameter): name for name, parameter in self.inner.named_parameters()}
            # what raises is known already; what was recorded before tells where
            with recorded(self.inner) as record, suppress(Exception):
                self.penalty(self.model, self.batch)
            yield record, names

    @contextmanager
    def placed(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Put copies in the place of the model's parameters and buffers.

        Args:
            values: Values of parameters, by name; all others are where they were.

        Yields:
            Nothing.
        """
        with ExitStack() as stack:
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            stack.callback(self._note, caught)
            stack.enter_context(grad_mode())
            stack.enter_context(_default_dtype(self.dtype))
            stack.enter_context(preserved_random_state(devices_of(self.inner)))
            for module in (self.inner, self.penalty.module):
                if module is not None:
                    self._replace(stack, module, values if module is self.inner else {})
            for module in self.calm:
                module.training = False  # an attribute, so it comes back with the others
            if self.model is not self.inner:
                self._wrap(stack)
            yield

    def _replace(self, stack: ExitStack, module: nn.Module, values: Mapping[str, Tensor]) -> None:
        stack.enter_context(preserved_attributes(module))
        if self.dtype is not None:
            _convert_attributes(module, self._copy)
        known = self.start if module is self.inner else {}
        tensors: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            value = values.get(name, known.get(name))
            value = self._copy(parameter) if value is None else value
            tensors[name] = nn.Parameter(value.detach().clone(), requires_grad=parameter.requires_grad)
        tensors.update({name: self._copy(buffer) for name, buffer in module.named_buffers()})
        stack.enter_context(swapped(module, tensors))

    def _wrap(self, stack: ExitStack) -> None:
        """Let calls of a wrapper reach the model without its collectives, which other processes would have to join."""
        outermost = self.model

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.through_wrapper += 1
            return self.inner(*args, **kwargs)

        before = dict(vars(outermost))

        def restore() -> None:
            vars(outermost).clear()
            vars(outermost).update(before)

        stack.callback(restore)
        vars(outermost)["forward"] = forward

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        if self.dtype is None or not (copy.is_floating_point() or copy.is_complex()):
            return copy
        return copy.to(self.dtype.to_complex() if copy.is_complex() else self.dtype)

    def _data(self, tensor: Tensor) -> Tensor:
        return self._copy(tensor).requires_grad_(tensor.requires_grad)

    def _note(self, caught: list[warnings.WarningMessage]) -> None:
        for warning in caught:
            text = str(warning.message)
            if text.startswith("Using backward() with create_graph=True"):
                text = (
                    "The penalty calls backward(create_graph=True): `.grad` then holds first plus second order, and "
                    "parameters are never freed. Take gradients with torch.autograd.grad or gradreg.gradients."
                )
                self.notes.extend([text] if text not in self.notes else [])
            if issubclass(warning.category, GradregWarning) and text not in self.notes:
                self.notes.append(text)


def _buffers(module: nn.Module) -> list[Tensor]:
    """Return the buffers of a module; not the running statistics of normalizations, which outputs in train mode ignore."""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return []
    return [buffer for buffer in module._buffers.values() if buffer is not None]


def _plain(outputs: Any) -> Any:
    return dict(vars(outputs)) if hasattr(outputs, "__dataclass_fields__") else outputs


def _convert_attributes(module: nn.Module, convert: Any) -> None:
    """Convert tensors that modules hold as plain attributes; `preserved_attributes` brings the originals back."""
    for part in all_modules(module):
        attributes = vars(part)
        for name, value in list(attributes.items()):
            if isinstance(value, Tensor) and value.is_floating_point():
                attributes[name] = convert(value)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Let tensors that a forward makes have the precision of the copies.

    Args:
        dtype: The precision; None changes nothing.

    Yields:
        Nothing.
    """
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)
