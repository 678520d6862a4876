"""Heads of the experiments."""

from __future__ import annotations

from torch import nn

from gradreg.experiments.activations import activation_layer

__all__ = ["mlp_heads"]


def mlp_heads(
    features: int, classes: int, count: int = 64, width: int = 16, activation: str = "softplus"
) -> list[nn.Module]:
    """Make equal heads with one hidden layer, initialized independently.

    Args:
        features: Number of features that the base gives.
        classes: Number of logits.
        count: Number of heads.
        width: Hidden units of a head.
        activation: Name of a torch.nn activation. With `"relu"` the penalty cannot reach a trainable base.

    Returns:
        The heads.
    """
    return [
        nn.Sequential(nn.Linear(features, width), activation_layer(activation), nn.Linear(width, classes))
        for _ in range(count)
    ]
