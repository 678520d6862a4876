"""Attention written out around a forward, so that its weights can be seen, replaced and differentiated."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradreg.model._walk import walk

MAP_SUFFIX = ":attention"
"""Behind the name of a module: the attention weights it computes, `[n, heads, queries, keys]`."""

_SDPA = F.scaled_dot_product_attention
_SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax)
_MULTI_HEAD = inspect.signature(nn.MultiheadAttention.forward)

Seen = Callable[[str, Tensor], Tensor]


def is_attention(module: nn.Module) -> bool:
    """Whether a module computes attention itself: its class is called so, and none inside it is."""
    return _named_attention(module) and not any(
        _named_attention(child) for child in module.modules() if child is not module
    )


def _named_attention(module: nn.Module) -> bool:
    return re.search(r"attention|attn", type(module).__name__, re.IGNORECASE) is not None


@contextmanager
def written_out_attention(model: nn.Module, seen: Seen, *, softmax: bool = False) -> Iterator[list[str]]:
    """Compute attention step by step in the forward inside, and show its weights on the way.

    Calls of `scaled_dot_product_attention` are answered by scores, softmax, dropout and product with the values, wherever
    they come from: a mode catches names bound at import, a swap of the function in `torch.nn.functional` the bodies that run
    without modes. `nn.MultiheadAttention` is kept to that function, and its returned weights are those on the path. The swap
    is seen by the whole process.

    Args:
        model: The module whose forward runs inside.
        seen: Given the name of the calling module and the weights `[n, heads, queries, keys]` behind the softmax and before
            dropout; returns the weights to go on with.
        softmax: Whether softmaxes of attention modules are attention too, for models that write it out themselves.

    Yields:
        The names of the attention modules that were called, filled as the forward runs.
    """
    interceptor = _Interceptor(seen, softmax)
    with ExitStack() as stack:
        for name, module in walk(model):
            stack.callback(module.register_forward_pre_hook(interceptor.enter(name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(interceptor.leave, with_kwargs=True, always_call=True).remove)
        before = F.scaled_dot_product_attention
        stack.callback(setattr, F, "scaled_dot_product_attention", before)
        F.scaled_dot_product_attention = interceptor.attend
        stack.enter_context(interceptor)
        yield interceptor.called


class _Interceptor(TorchFunctionMode):
    def __init__(self, seen: Seen, softmax: bool) -> None:
        super().__init__()
        self.seen, self.softmax = seen, softmax
        self.called: list[str] = []
        self.open: list[tuple[str, nn.Module]] = []
        self.asked: list[tuple[bool, bool]] = []  # of open MultiheadAttentions: are weights wanted, averaged over heads
        self.last: dict[str, Tensor] = {}
        self.inside = 0

    def enter(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.open.append((name, module))
            if is_attention(module):
                self.called.append(name)
            if not isinstance(module, nn.MultiheadAttention):
                return None
            given = _MULTI_HEAD.bind(module, *args, **kwargs)
            given.apply_defaults()
            named = {key: value for key, value in given.arguments.items() if key != "self"}
            self.asked.append((named["need_weights"], named["average_attn_weights"]))
            named["need_weights"] = False
            return (), named

        return hook

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self.open:
            return None
        name, _ = self.open.pop()
        if not isinstance(module, nn.MultiheadAttention):
            return None
        wanted, averaged = self.asked.pop()
        weights = self.last.pop(name, None)
        if output is None or not wanted or weights is None:
            return output
        if kwargs["query"].dim() == 2:
            weights = weights.squeeze(0)
        return output[0], weights.mean(-3) if averaged else weights

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer attention; pass all else on."""
        kwargs = kwargs or {}
        if func is _SDPA:
            return self.attend(*args, **kwargs)
        output = func(*args, **kwargs)
        if self.softmax and not self.inside and func in _SOFTMAX and output.dim() == 4 and _is_last(args, kwargs):
            owner = next((name for name, module in reversed(self.open) if is_attention(module)), None)
            if owner is not None:
                return self._shown(owner, output)
        return output

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.inside += 1
        try:
            if enable_gqa:
                key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
                value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
            weights = attention_weights(query, key, attn_mask, is_causal, scale)
            weights = self._shown(self.open[-1][0] if self.open else "", weights)
            if dropout_p > 0:
                weights = F.dropout(weights, dropout_p)
            return weights @ value
        finally:
            self.inside -= 1

    def _shown(self, name: str, weights: Tensor) -> Tensor:
        self.last[name] = weights = self.seen(name, weights)
        return weights


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return `softmax(scale * query @ key.T + mask)`, as `scaled_dot_product_attention` has it inside.

    Half precision is computed in float32. Rows in which no key is visible are zero, as there, not NaN.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    q, k = (query.float(), key.float()) if half else (query, key)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = F.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
    return weights.to(query.dtype)


def _is_last(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    return axis in (-1, 3)


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """Let models of transformers write their attention out themselves inside, whatever they are configured to use.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    attribute = "_attn_implementation_internal"
    before = [
        (config, vars(config)[attribute]) for config in configs.values() if attribute in getattr(config, "__dict__", {})
    ]
    try:
        for config, _ in before:
            vars(config)[attribute] = "eager"
        yield
    finally:
        for config, value in before:
            vars(config)[attribute] = value
