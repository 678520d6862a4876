"""Kernels that can be differentiated twice and transformed, in place of the fused ones, around a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from gradreg.model._norms import written_out_norms
from gradreg.model._walk import all_modules

# Of flash, memory-efficient, cuDNN and math attention, the one that can be differentiated twice
MATH_ONLY = (False, False, False, True)

# Where modules of transformers keep whether they checkpoint in train mode
_CHECKPOINTING = "gradient_checkpointing"


@contextmanager
def differentiable_kernels(
    model: nn.Module, *, twice: bool, written_out: bool = False, modules: list[nn.Module] | None = None
) -> Iterator[None]:
    """Choose kernels for the forward inside.

    The inference path of `nn.TransformerEncoder` and `nn.MultiheadAttention` is always switched off: it looks at
    `requires_grad`, which is False inside transforms. With `twice`, scaled dot-product attention runs on its math kernel
    (the fused ones have no derivative of their backward, and no forward mode) and recurrent networks leave cuDNN. Must
    surround the forward; around the backward it is too late. Models of transformers do not checkpoint their activations: they
    would be computed again in the backward, with other kernels and with other parameters than those put in for the forward.

    Args:
        model: The module whose forward runs inside.
        twice: Whether the result will be differentiated again, or transformed by vmap or jvp.
        written_out: Whether layer and instance normalization are computed without their kernels (`written_out_norms`).
        modules: The modules of the model, where they are known already.

    Yields:
        Nothing.
    """
    modules = all_modules(model) if modules is None else modules
    recurrent = twice and torch.backends.cudnn.is_available() and any(isinstance(m, nn.RNNBase) for m in modules)
    fast_path, kernels = torch.backends.mha.get_fastpath_enabled(), attention_kernels()
    checkpointed = [vars(module) for module in modules if _checkpoints(module)]
    try:
        for attributes in checkpointed:
            attributes[_CHECKPOINTING] = False
        torch.backends.mha.set_fastpath_enabled(False)
        if twice:
            _allow(MATH_ONLY)
        with (
            torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext(),
            written_out_norms(model, len(modules)) if written_out else nullcontext(),
        ):
            yield
    finally:
        for attributes in checkpointed:
            attributes[_CHECKPOINTING] = True
        torch.backends.mha.set_fastpath_enabled(fast_path)
        if twice:
            _allow(kernels)


def checkpoints_activations(model: nn.Module) -> bool:
    """Whether a module of transformers, as it is now, computes its activations again in the backward."""
    return any(map(_checkpoints, all_modules(model)))


def _checkpoints(module: nn.Module) -> bool:
    return module.training and bool(vars(module).get(_CHECKPOINTING))


def attention_kernels() -> tuple[bool, ...]:
    """Return which kernels of scaled dot-product attention are allowed: flash, memory-efficient, cuDNN, math."""
    return tuple([enabled() for _, enabled in _SWITCHES])


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
        _allow(kernels)
        yield
    finally:
        _allow(before)


def _allow(kernels: tuple[bool, ...]) -> None:
    for (switch, _), enabled in zip(_SWITCHES, kernels, strict=True):
        switch(enabled)


_SWITCHES: tuple[tuple[Callable[[bool], None], Callable[[], bool]], ...] = (
    (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled),
    (torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.mem_efficient_sdp_enabled),
    (torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled),
    (torch.backends.cuda.enable_math_sdp, torch.backends.cuda.math_sdp_enabled),
)
