"""Which attention maps a model has, found once by measurement: counted, and its outputs compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradreg.batch import Batch
from gradreg.errors import CompatibilityError
from gradreg.model import (
    MATH_ONLY,
    Ensemble,
    SharedBase,
    Tap,
    allowed_attention_kernels,
    at_rest,
    call,
    compiled_modules,
    eager_attention,
    tapped,
    written_out_attention,
)


@dataclass(frozen=True)
class Attentions:
    """How the attention of a model is reached.

    Attributes:
        calls: From the name of every module that computes attention to how often a forward calls it.
        silent: Attention modules that were called and whose weights were not seen.
        softmax: Whether maps are softmaxes that the model writes out itself.
        eager: Whether the model must be told to write them out.
        problem: Why the maps cannot be trusted; empty if they can.
    """

    calls: dict[str, int] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    softmax: bool = False
    eager: bool = False
    problem: str = ""

    @property
    def how(self) -> str:
        """Say where the maps are seen."""
        if self.eager:
            return "softmaxes of eager attention, which the model is told to use in the forward"
        return "softmaxes that the model writes out" if self.softmax else "calls of scaled_dot_product_attention"


_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], Attentions]] = WeakKeyDictionary()

# Outputs with and without interception agree to this share of the largest; models of float64 often compute in float32 inside
_SHARE = {torch.float64: 1e-5, torch.float32: 1e-5}
_HALF_SHARE = 0.05


def attentions(inner: nn.Module, batch: Batch) -> Attentions:
    """Find the attention maps of a model from forwards on two examples; each model is looked at once.

    First calls of `scaled_dot_product_attention` are intercepted; where attention modules stay silent their softmaxes are,
    and where that is not enough the model is told to use eager attention for the time of a forward. Two forwards must make
    the same calls and give the outputs of a forward without interception.

    Raises:
        CompatibilityError: If a part of the model is compiled: its calls are not seen.
    """
    compiled = compiled_modules(inner)
    if compiled:
        raise CompatibilityError(
            f"The attention of a compiled module cannot be seen ({', '.join(map(repr, compiled[:3]))}). Pass the uncompiled "
            "model (model._orig_mod), or one on which .compile() was not called."
        )
    known = _KNOWN.setdefault(inner, {})
    key = (inner.training, _implementations(inner), *batch.input_names)
    if key not in known:
        known[key] = _looked_at(inner, batch[:2])
    return known[key]


@contextmanager
def reached(inner: nn.Module, found: Attentions, seen: Any) -> Iterator[list[str]]:
    """Show the maps of the forward inside to `seen(module name, weights) -> weights`.

    Args:
        inner: The model.
        found: What is known of its attention.
        seen: Called with every map.

    Yields:
        The names of the attention modules that were called.
    """
    with (
        eager_attention(inner) if found.eager else nullcontext(),
        written_out_attention(inner, seen, softmax=found.softmax) as called,
    ):
        yield called


def _implementations(inner: nn.Module) -> tuple[object, ...]:
    """Return what the configurations in a model say of its attention, so that a change is noticed."""
    configs = {
        id(config): config for module in inner.modules() if (config := getattr(module, "config", None)) is not None
    }
    names = ("_attn_implementation", "output_attentions")
    return tuple(getattr(config, name, None) for config in configs.values() for name in names)


def _run(inner: nn.Module, batch: Batch) -> Any:
    """Run the model; heads one by one, for in a vmapped pass only one of them is called."""
    tap = Tap(inner, one_by_one=True) if isinstance(inner, (SharedBase, Ensemble)) else None
    with tapped(tap):
        return call(inner, batch)


def _looked_at(inner: nn.Module, batch: Batch) -> Attentions:
    found = Attentions()
    with at_rest(inner):
        plain = _run(inner, batch)
        for softmax, eager in ((False, False), (True, False), (True, True)):
            found, outputs = _tried(inner, batch, Attentions(softmax=softmax, eager=eager))
            if found.calls and not found.silent:
                break
        again, _ = _tried(inner, batch, found)
        if again.calls != found.calls:
            return replace(
                found, problem=f"two forwards make different attention calls, {found.calls} and {again.calls}"
            )
        difference = _difference(plain, outputs, batch)
        if difference is not None:
            with allowed_attention_kernels(MATH_ONLY):  # what rounding does between kernels that are both right
                rounding = _difference(plain, _run(inner, batch), batch, share=0.0)
            if rounding is None or difference.gap > 10 * rounding.gap:
                return replace(found, problem=str(difference))
    return found


def _tried(inner: nn.Module, batch: Batch, how: Attentions) -> tuple[Attentions, Any]:
    calls: dict[str, int] = {}

    def seen(name: str, weights: Tensor) -> Tensor:
        calls[name] = calls.get(name, 0) + 1
        return weights

    with reached(inner, how, seen) as called:
        outputs = _run(inner, batch)
    silent = tuple(name for name in dict.fromkeys(called) if name not in calls)
    return Attentions(calls, silent, how.softmax, how.eager), outputs


@dataclass(frozen=True)
class _Difference:
    gap: float
    text: str

    def __str__(self) -> str:
        return self.text


def _difference(plain: Any, outputs: Any, batch: Batch, share: float | None = None) -> _Difference | None:
    """Return the largest difference of outputs on the positions that a mask leaves visible, if it is not rounding."""
    mask = batch.named_inputs().get("attention_mask")
    largest: _Difference | None = None
    for before, after in zip(_floats(plain), _floats(outputs), strict=False):
        if before.shape != after.shape:
            return _Difference(
                math.inf,
                f"an output has shape {tuple(before.shape)} without interception and {tuple(after.shape)} with it",
            )
        if isinstance(mask, Tensor) and mask.dim() == 2 and before.shape[:2] == mask.shape:
            before, after = before[mask.bool()], after[mask.bool()]
        scale = float(before.abs().max()) if before.numel() else 0.0
        gap = float((before - after).abs().max()) if before.numel() else 0.0
        allowed = _SHARE.get(before.dtype, _HALF_SHARE) if share is None else share
        if not gap <= allowed * scale and (largest is None or not gap <= largest.gap):
            text = f"outputs differ by {gap:.3g} (largest {scale:.3g}) from those without interception"
            largest = _Difference(gap, text)
    return largest


def _floats(outputs: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
