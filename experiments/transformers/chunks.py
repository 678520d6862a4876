"""How many points of a path fit into memory, by what one of them takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gradreg as gr

__all__ = ["points_at_a_time"]

_OVERHEAD = 2  # gradients, or tangents, of what a forward keeps, and what is freed late


def points_at_a_time(model: nn.Module, batch: gr.Batch, memory: int) -> int:
    """Return a `chunk_size`: the embeddings that are moved say little about a model with wide layers and many logits.

    Args:
        model: The model.
        batch: What is attributed; its first example is run once.
        memory: Bytes.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs: Any = model(**batch[:1].named_inputs())
    largest = max((value.nbytes for value in outputs.values() if isinstance(value, Tensor)), default=0)
    return max(1, memory // (_OVERHEAD * (sum(kept.values()) + largest) or 1))
