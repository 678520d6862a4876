"""Activation layers by name."""

from __future__ import annotations

from torch import nn

import gradreg as gr
from gradreg.errors import closest

__all__ = ["ACTIVATIONS", "activation_layer"]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,  # second derivative exists but jumps at 0
    "gelu": nn.GELU,
    "identity": nn.Identity,  # linear heads
    "mish": nn.Mish,
    "relu": nn.ReLU,  # second derivative is zero: a penalty on gradients cannot reach what lies below
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}


def activation_layer(name: str) -> nn.Module:
    """Make the activation of that name.

    Raises:
        UnknownNameError: If there is none; the closest names are listed.
    """
    if name not in ACTIVATIONS:
        raise gr.errors.UnknownNameError(f"No activation {name!r}; the closest are {closest(name, ACTIVATIONS)}.")
    return ACTIVATIONS[name]()
