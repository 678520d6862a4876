"""Small models, batches and a naive integrated gradients to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def bert(classes: int = 3, *, layers: int = 2, seed: int = 0, kind: str = "BertForTokenClassification") -> nn.Module:
    import transformers

    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=classes,
        max_position_embeddings=16,
    )
    model = getattr(transformers, kind)(config).double().eval()
    with torch.no_grad():  # far from linear, and such that a lost mask shows
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                parameter.mul_(8)
    return model


def tokens(lengths: list[int], width: int | None = None, *, left: bool = False, seed: int = 1) -> dict[str, Tensor]:
    """Token ids with an attention mask, padded with 0 on the right or left."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths) if width is None else width
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if left else slice(0, length)
        ids[row, place] = torch.randint(3, 40, (length,), generator=generator)
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


def naive(
    run: Callable[[Tensor], Tensor], value: Tensor, baseline: Tensor, steps: int, target: Callable[[Tensor], Tensor]
) -> Tensor:
    """Integrated gradients of one target of one example, a point at a time: `run` maps the value `[1, ...]` to outputs."""
    points, weights = np.polynomial.legendre.leggauss(steps)
    total = torch.zeros_like(value)
    for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
        at = (baseline + float(point) * (value - baseline)).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(target(run(at)), at)
        total = total + float(weight) * gradient
    return (total * (value - baseline)).detach()


class Runner:
    """Logits of a model as a function of what its embedding returns, for single examples."""

    def __init__(self, model: nn.Module, embedding: nn.Module, inputs: dict[str, Any]) -> None:
        self.model, self.embedding, self.inputs = model, embedding, inputs

    def __call__(self, vectors: Tensor) -> Tensor:
        handle = self.embedding.register_forward_hook(lambda module, args, output: vectors)
        try:
            return self.model(**self.inputs).logits
        finally:
            handle.remove()
