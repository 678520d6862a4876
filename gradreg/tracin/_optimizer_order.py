"""Which parameter is which in the state of an optimizer, where they are numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradreg.errors import CheckpointError

__all__ = ["ordered_names"]


def ordered_names(
    state: Mapping[str, Any], parameters: Mapping[str, Tensor], order: Sequence[str] | None, place: str
) -> list[list[str]]:
    """Return the names of the parameters of every group of an optimizer.

    Read are, in this order: `order`; the names that the optimizer itself saved (`param_names`); the order of
    `model.parameters()`, all or the trainable ones; the two groups of the HF Trainer (with and without weight decay). Each
    must fit all saved shapes, and only one may fit, unless the optimizer has a single group.

    Raises:
        CheckpointError: If none fits, or several do.
    """
    groups: Sequence[Mapping[str, Any]] = state["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    if order is not None:
        return _checked("optimizer_parameters", _cut(list(order), sizes), state, parameters, place)
    if all(group.get("param_names") for group in groups):
        named = [[str(name).removeprefix("module.") for name in group["param_names"]] for group in groups]
        if all(name in parameters for names in named for name in names):
            return _checked("param_names", named, state, parameters, place)
    everything = list(parameters)
    trainable = [name for name in everything if parameters[name].requires_grad]
    candidates = [
        _cut(names, sizes) for names in ([everything] if everything == trainable else [everything, trainable])
    ]
    if len(groups) == 2:
        candidates.append(_with_and_without_decay(trainable, parameters))
    fitting: list[list[list[str]]] = []
    for candidate in candidates:
        if candidate not in fitting and _misfit(candidate, state, parameters) is None:
            fitting.append(candidate)
    if len(fitting) == 1:
        return fitting[0]
    found = "none of the usual orders fits" if not fitting else "several orders fit"
    raise CheckpointError(
        f"{place}: the optimizer numbers its parameters ({sizes} in its groups, {len(trainable)} trainable in the model), and "
        f"{found} their shapes. Give their names in the order in which the optimizer got them: "
        "Checkpoint(..., optimizer_parameters=[...])."
    )


def _cut(names: list[str], sizes: Sequence[int]) -> list[list[str]]:
    if sum(sizes) != len(names):
        return []
    rest = iter(names)
    return [[next(rest) for _ in range(size)] for size in sizes]


def _with_and_without_decay(names: list[str], parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Split as HF's Trainer does: biases and the weights of norms have no weight decay; these weights are vectors."""
    without = [name for name in names if name.endswith("bias") or parameters[name].dim() < 2]
    return [[name for name in names if name not in without], without]


def _misfit(names: list[list[str]], state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> str | None:
    """Return what does not fit, or None."""
    groups = state["param_groups"]
    if [len(members) for members in names] != [len(group["params"]) for group in groups]:
        return (
            f"{[len(members) for members in names]} names for {[len(group['params']) for group in groups]} parameters"
        )
    for group, members in zip(groups, names, strict=True):
        for index, name in zip(group["params"], members, strict=True):
            if name not in parameters:
                return f"the model has no parameter {name!r}"
            for key, value in state["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameters[name].shape:
                    return f"{key} of {name} is {tuple(value.shape)}, the parameter {tuple(parameters[name].shape)}"
    return None


def _checked(
    source: str, names: list[list[str]], state: Mapping[str, Any], parameters: Mapping[str, Tensor], place: str
) -> list[list[str]]:
    problem = _misfit(names, state, parameters)
    if problem is not None:
        raise CheckpointError(f"{place}: {source} does not fit the optimizer: {problem}.")
    return names
