"""What of a language model's outputs is explained: pooled embeddings, chosen logits, classes, the tokens of a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gradreg as gr
from gradreg.scalars import read_outputs

__all__ = ["QUANTITIES", "Chosen", "Classes", "Pooled", "Predicted", "pooled"]

QUANTITIES = ("logit", "log_probability", "probability")


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the states of real tokens, `[n, d]`, as sentence encoders pool."""
    weights = mask.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(1) / weights.sum(1)


@dataclass(frozen=True)
class Pooled:
    """The cosine of the pooled embedding with `extras["reference"]`, or the norm of the pooled embedding, `[n]`."""

    kind: str

    def __call__(self, outputs: Any, batch: gr.Batch) -> Tensor:
        """Return the scalars of a batch."""
        vector = pooled(read_outputs(outputs, "last_hidden_state"), batch.named_inputs()["attention_mask"])
        if self.kind == "norm":
            return vector.norm(dim=-1)
        return F.cosine_similarity(vector, batch.extras["reference"].to(vector), dim=-1)


@dataclass(frozen=True)
class Classes:
    """All classes of every example, or of every token, `[n, C]` or `[n, T, C]`."""

    quantity: str

    def __call__(self, outputs: Any, batch: gr.Batch) -> Tensor:
        """Return the scalars of a batch."""
        return _of_quantity(read_outputs(outputs), self.quantity)


@dataclass(frozen=True)
class Chosen:
    """The tokens `extras["candidates"]` at `extras["position"]` of every example, `[n, k]`."""

    quantity: str

    def __call__(self, outputs: Any, batch: gr.Batch) -> Tensor:
        """Return the scalars of a batch."""
        logits, candidates = read_outputs(outputs), batch.extras["candidates"]
        place = batch.extras["position"].view(-1, 1, 1).expand(-1, 1, logits.shape[-1])
        values = _of_quantity(torch.take_along_dim(logits, place, 1).squeeze(1), self.quantity)
        return torch.take_along_dim(values, candidates, -1)


@dataclass(frozen=True)
class Predicted:
    """The tokens `extras["answers"]`, each at its own position, `[n, T]`."""

    quantity: str

    def __call__(self, outputs: Any, batch: gr.Batch) -> Tensor:
        """Return the scalars of a batch."""
        values = _of_quantity(read_outputs(outputs), self.quantity)
        return torch.take_along_dim(values, batch.extras["answers"].unsqueeze(-1), -1).squeeze(-1)


def _of_quantity(logits: Tensor, quantity: str) -> Tensor:
    if quantity == "logit":
        return logits
    return F.log_softmax(logits, -1) if quantity == "log_probability" else F.softmax(logits, -1)
