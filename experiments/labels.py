"""What arms are called in tables and plots."""

from __future__ import annotations

__all__ = ["arm_label"]

_LABELS = {
    "no_penalty": "no penalty",
    "penalty": "penalty",
    "penalty_without_l1": "penalty, without sparse first layers",
    "trainable_base_no_penalty": "trainable base, no penalty",
    "trainable_base_relu_heads": "trainable base, penalty, ReLU heads",
    "trainable_base_softplus_heads": "trainable base, penalty, Softplus heads",
    "trainable_base_penalty_below": "trainable base, penalty below it",
}


def arm_label(name: str) -> str:
    """Return the label of an arm; arms of users are shown by name."""
    return _LABELS.get(name, name.replace("_", " "))
