"""Kernels that can be differentiated twice and transformed, in place of the fused ones, around a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from gradreg.model._norms import written_out_norms
from gradreg.model._walk import all_modules


@contextmanager
def _math_attention() -> Iterator[None]:
    """Leave scaled dot-product attention no kernel but the math one; as `sdpa_kernel`, at a tenth of its cost.

    Yields:
        Nothing.
    """
    backends = torch.backends.cuda
    before = (
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
        backends.math_sdp_enabled(),
    )
    switches = (
        backends.enable_flash_sdp,
        backends.enable_mem_efficient_sdp,
        backends.enable_cudnn_sdp,
        backends.enable_math_sdp,
    )
    try:
        for switch, enabled in zip(switches, (False, False, False, True), strict=True):
            switch(enabled)
        yield
    finally:
        for switch, enabled in zip(switches, before, strict=True):
            switch(enabled)


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
            stack.enter_context(_math_attention())
            if torch.backends.cudnn.is_available() and any(
                isinstance(module, nn.RNNBase) for module in all_modules(model)
            ):
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if written_out:
            stack.enter_context(written_out_norms(model, len(modules or all_modules(model))))
        yield
