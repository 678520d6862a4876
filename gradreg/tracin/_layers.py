"""Scores per layer from scores per parameter."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["by_layer"]


def by_layer(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add up the parts of parameters that one module owns; a parameter of the model itself is a layer of its own."""
    layers: dict[str, Tensor] = {}
    for name, part in parts.items():
        layer = name.rpartition(".")[0] or name
        layers[layer] = layers[layer] + part if layer in layers else part
    return layers
