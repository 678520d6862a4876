"""Scalars that mix heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.scalars._outputs import ScalarFunction, bind


@dataclass(frozen=True)
class AcrossHeads:
    """See `across_heads`."""

    function: ScalarFunction

    def bind(self, model: nn.Module) -> AcrossHeads:
        """Bind the wrapped scalar to the model."""
        return AcrossHeads(bind(self.function, model))

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]` or `[n, *targets]`."""
        return self.function(outputs, batch)


def across_heads(function: ScalarFunction) -> AcrossHeads:
    """A scalar that is given the outputs of all heads, `[n, K, ...]`, and mixes them into `[n]` or `[n, *targets]`.

    Args:
        function: `(outputs, batch) -> [n]` or `[n, *targets]`.

    Example:
        >>> import torch, gradreg as gr
        >>> model = gr.SharedBase(torch.nn.Linear(3, 4), [torch.nn.Linear(4, 2) for _ in range(5)])
        >>> of = gr.across_heads(lambda outputs, batch: outputs.mean(1)[:, 0])
        >>> gr.gradients(model, torch.zeros(2, 3), of=of, wrt=gr.Inputs())["inputs"].shape
        torch.Size([2, 3])
    """
    return AcrossHeads(function)
