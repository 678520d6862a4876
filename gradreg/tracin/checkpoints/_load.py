"""Weights into a model, with every difference named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from gradreg.errors import CheckpointError, closest
from gradreg.model import parameter_aliases

__all__ = ["load_weights"]

_SHOWN = 3


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], place: str) -> None:
    """Copy weights into a model, in place.

    Names may carry one common prefix, as those of Lightning (`model.`), DDP (`module.`) and compiled modules
    (`_orig_mod.`) do; what lies outside the prefix is not the model's. A tied weight may be there under one of its names
    only, as safetensors store it.

    Raises:
        CheckpointError: If a weight is missing, is not the model's, or has another shape.
    """
    own = model.state_dict()
    tied = _tied_names(model)
    fitting = _without_prefix(weights, own, tied)
    missing = [name for name in own if not _is_there(name, fitting, tied)]
    unknown = [name for name in fitting if name not in own]
    shapes = [
        f"{name} ({tuple(fitting[name].shape)}, in the model {tuple(own[name].shape)})"
        for name in own
        if name in fitting and isinstance(own[name], Tensor) and fitting[name].shape != own[name].shape
    ]
    problems = []
    if missing:
        problems.append(f"lacks {_listed(missing)} (closest there: {closest(missing[0], fitting)})")
    if unknown:
        problems.append(f"has {_listed(unknown)}, which the model does not have")
    if shapes:
        problems.append(f"has other shapes: {_listed(shapes)}")
    if problems:
        raise CheckpointError(f"{place} does not fit {type(model).__name__}: it " + "; it ".join(problems) + ".")
    model.load_state_dict(fitting, strict=False)


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Map every name of a shared parameter to all its names."""
    groups: dict[str, list[str]] = {}
    for name, first in parameter_aliases(model).items():
        groups.setdefault(first, []).append(name)
    return {name: names for names in groups.values() for name in names if len(names) > 1}


def _is_there(name: str, weights: Mapping[str, Tensor], tied: Mapping[str, list[str]]) -> bool:
    return any(other in weights for other in tied.get(name, [name]))


def _without_prefix(
    weights: Mapping[str, Tensor], own: Mapping[str, Tensor], tied: Mapping[str, list[str]]
) -> dict[str, Tensor]:
    if any(name in own for name in weights):
        return dict(weights)
    anchor = next(iter(own), "")
    for name in weights:
        if not any(name.endswith("." + other) for other in tied.get(anchor, [anchor])):
            continue
        suffix = next(other for other in tied.get(anchor, [anchor]) if name.endswith("." + other))
        prefix = name[: len(name) - len(suffix)]
        inner = {key[len(prefix) :]: value for key, value in weights.items() if key.startswith(prefix)}
        if all(_is_there(other, inner, tied) for other in own):
            return inner
    return dict(weights)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
