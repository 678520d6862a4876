"""A Module as a pure function of its parameters and buffers, safe for tied weights and modules with two names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from gradreg.errors import UnknownNameError, closest
from gradreg.model._walk import all_modules, walk


def _owned(model: nn.Module, kind: str) -> dict[str, list[tuple[nn.Module, str]]]:
    """Map the first name of every distinct tensor to all (module, attribute) places that hold it.

    `walk` yields each module object once, so a module reachable under two names is swapped once. The stock
    `torch.func.functional_call` swaps it twice and puts the temporary tensor back (pytorch/pytorch#164759).
    """
    first: dict[int, str] = {}
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, module in walk(model):
        for attribute, tensor in getattr(module, kind).items():
            if tensor is None:
                continue
            name = first.setdefault(id(tensor), f"{prefix}.{attribute}" if prefix else attribute)
            places.setdefault(name, []).append((module, attribute))
    return places


def parameter_aliases(model: nn.Module) -> dict[str, str]:
    """Map every name of every parameter, also those of tied and twice-registered ones, to its first name."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


@contextmanager
def swapped(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put tensors in the place of parameters and buffers for the duration of the context.

    Args:
        model: The module; it is left with the very same parameter and buffer objects, also after an exception.
        tensors: From the first name of a parameter or buffer to the tensor that stands in for it. All places that share
            the parameter get the same tensor, so the gradient is the sum over uses.

    Yields:
        Nothing.

    Raises:
        UnknownNameError: If a name is not a parameter or buffer of the model.
    """
    if not tensors:
        yield
        return
    parameters, buffers = _owned(model, "_parameters"), _owned(model, "_buffers")
    for name in tensors:
        if name not in parameters and name not in buffers:
            raise UnknownNameError(
                f"The model has no parameter or buffer {name!r}; the closest are "
                f"{closest(name, [*parameters, *buffers])}."
            )
    undo: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
    recurrent = [module for module in all_modules(model) if isinstance(module, nn.RNNBase)]
    try:
        for name, tensor in tensors.items():
            kind, places = ("_parameters", parameters) if name in parameters else ("_buffers", buffers)
            for module, attribute in places[name]:
                slots = getattr(module, kind)
                undo.append((slots, attribute, slots[attribute]))
                slots[attribute] = tensor
        _refresh(recurrent)
        yield
    finally:
        for slots, attribute, original in reversed(undo):
            slots[attribute] = original
        _refresh(recurrent)


def _refresh(recurrent: list[nn.RNNBase]) -> None:
    # RNNs keep a second list of their weights, which the kernels read
    for module in recurrent:
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def cloned_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every buffer by its first name, for `swapped`: the originals are then never written to."""
    if not any(module._buffers for module in all_modules(model)):
        return {}
    return {name: getattr(places[0][0], places[0][1]).clone() for name, places in _owned(model, "_buffers").items()}
