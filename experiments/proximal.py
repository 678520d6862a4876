"""Proximal steps: what is done to weights after every optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import gradreg as gr
from gradreg.wrt import match_names

__all__ = ["SoftThreshold"]


@dataclass(frozen=True)
class SoftThreshold:
    r"""The proximal step of an L1 penalty, $w \leftarrow \mathrm{sign}(w) \max(|w| - \eta s, 0)$ at learning rate $\eta$.

    It makes weights exactly zero. On the first layer of heads it lets each head read few features, which is what turns
    different gradients into different parts of the input; alone it does not (compare the arms).

    Args:
        strength: $s$, the weight of the L1 penalty.
        parameters: Glob of the weights that shrink, as for `gradreg.Params`.

    Raises:
        GradregError: If the strength is negative.
    """

    strength: float
    parameters: str

    def __post_init__(self) -> None:
        if not 0 <= self.strength < float("inf"):
            raise gr.errors.GradregError(f"strength is {self.strength}; allowed are finite numbers from 0 up.")

    @torch.no_grad()
    def __call__(self, model: nn.Module, learning_rate: float) -> None:
        """Shrink the weights in place.

        Raises:
            UnknownNameError: If no parameter matches; the closest names are listed.
        """
        parameters = dict(model.named_parameters())
        for name in match_names(self.parameters, parameters, "parameter"):
            weight = parameters[name]
            weight.copy_(nn.functional.softshrink(weight, learning_rate * self.strength))
