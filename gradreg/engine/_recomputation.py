"""Forwards that must not be computed again in their backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

from gradreg.errors import CompatibilityError

_RECOMPUTED = (
    "at replaces parameters for the forward alone, and a part of the model is checkpointed (torch.utils.checkpoint): its "
    "backward would compute it again with the parameters of the model. Switch checkpointing off for this call."
)


@contextmanager
def without_recomputation() -> Iterator[None]:
    """Refuse parts of a forward that are computed again in the backward, when other parameters are in place.

    Yields:
        Nothing.
    """
    guard = torch.autograd.graph.disable_saved_tensors_hooks(_RECOMPUTED)
    with ExitStack() as stack:
        with suppress(RuntimeError):  # hooks of the caller are active, such as save_on_cpu, and cannot be told apart
            stack.enter_context(guard)
        try:
            yield
        except RuntimeError as problem:
            if str(problem) != _RECOMPUTED:
                raise
            raise CompatibilityError(_RECOMPUTED) from None
