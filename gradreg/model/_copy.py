"""A copy of a module that shares nothing with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from gradreg.errors import CompatibilityError
from gradreg.model._walk import walk

M = TypeVar("M", bound=nn.Module)


def copied(module: M) -> M:
    """Return a deep copy: parameters, ties, buffers, hooks, flags and subclasses as they are, tensors of its own.

    The old `torch.nn.utils.weight_norm` and `spectral_norm` leave a computed weight behind each forward, which deepcopy refuses;
    since the next forward computes it anew, the copy gets its value.

    Args:
        module: Any module.

    Returns:
        The copy.

    Raises:
        CompatibilityError: If a module holds a tensor with a graph, or something else that cannot be copied.
    """
    memo: dict[int, object] = {}
    for name, owner, attribute, tensor in _with_graph(module):
        if attribute not in _recomputed(owner):
            raise CompatibilityError(
                f"{name or type(module).__name__}.{attribute} is a tensor with a graph of an earlier forward, which cannot be "
                f"copied. Reset it first (module.{attribute} = None), or let the forward store {attribute}.detach()."
            )
        memo[id(tensor)] = tensor.detach().clone()
    try:
        return copy.deepcopy(module, memo)
    except Exception as problem:
        raise CompatibilityError(
            f"The {type(module).__name__} cannot be copied: {str(problem).splitlines()[0] if str(problem) else problem!r} "
            "Build it anew and load its state dict, or drop what cannot be copied (locks, open files, generators)."
        ) from problem


def _with_graph(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for name, owner in walk(module):
        for attribute, value in vars(owner).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                yield name, owner, attribute, value


def _recomputed(module: nn.Module) -> set[str]:
    """Names of the weights that an old-style norm computes before every forward."""
    return {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, (WeightNorm, SpectralNorm))}
