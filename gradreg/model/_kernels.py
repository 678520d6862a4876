"""Kernels that can be differentiated twice and transformed, in place of the fused ones, around a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from gradreg.model._norms import written_out_norms
from gradreg.model._walk import all_modules

# Of flash, memory-efficient, cuDNN and math attention, the one that can be differentiated twice
MATH_ONLY = (False, False, False, True)


@contextmanager
def differentiable_kernels(
    model: nn.Module, *, twice: bool, written_out: bool = False, modules: list[nn.Module] | None = None
) -> Iterator[None]:
    """Choose kernels for the forward inside.

    The inference path of `nn.TransformerEncoder` and `nn.MultiheadAttention` is always switched off: it looks at
    `requires_grad`, which is False inside transforms. With `twice`, scaled dot-product attention runs on its math kernel
    (the fused ones have no derivative of their backward, and no forward mode) and recurrent networks leave cuDNN. Must
    surround the forward; around the backward it is too late.

    Args:
        model: The module whose forward runs inside.
        twice: Whether the result will be differentiated again, or transformed by vmap or jvp.
        written_out: Whether layer and instance normalization are computed without their kernels (`written_out_norms`).
        modules: The modules of the model, where they are known already.

    Yields:
        Nothing.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        if fast_path:
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, True)
        if twice:
            stack.enter_context(allowed_attention_kernels(MATH_ONLY))
            if torch.backends.cudnn.is_available() and any(
                isinstance(module, nn.RNNBase) for module in all_modules(model)
            ):
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if written_out:
            stack.enter_context(written_out_norms(model, len(modules or all_modules(model))))
        yield


def attention_kernels() -> tuple[bool, ...]:
    """Return which kernels of scaled dot-product attention are allowed: flash, memory-efficient, cuDNN, math."""
    return tuple(enabled() for _, enabled in _switches())


@contextmanager
def allowed_attention_kernels(kernels: tuple[bool, ...]) -> Iterator[None]:
    """Allow these kernels of scaled dot-product attention; as `sdpa_kernel`, at a tenth of its cost.

    Args:
        kernels: One flag a kernel, in the order of `attention_kernels`.

    Yields:
        Nothing.
    """
    before = attention_kernels()
    try:
        for (switch, _), enabled in zip(_switches(), kernels, strict=True):
            switch(enabled)
        yield
    finally:
        for (switch, _), enabled in zip(_switches(), before, strict=True):
            switch(enabled)


def _switches() -> tuple[tuple[Callable[[bool], None], Callable[[], bool]], ...]:
    backends = torch.backends.cuda
    return (
        (backends.enable_flash_sdp, backends.flash_sdp_enabled),
        (backends.enable_mem_efficient_sdp, backends.mem_efficient_sdp_enabled),
        (backends.enable_cudnn_sdp, backends.cudnn_sdp_enabled),
        (backends.enable_math_sdp, backends.math_sdp_enabled),
    )
