"""What arms are called in tables and plots, and their colors."""

from __future__ import annotations

__all__ = ["arm_color", "arm_label"]

_LABELS = {
    "no_penalty": "no penalty",
    "penalty": "penalty",
    "penalty_without_l1": "penalty, without sparse first layers",
    "trainable_base_no_penalty": "trainable base, no penalty",
    "trainable_base_relu_heads": "trainable base, penalty, ReLU heads",
    "trainable_base_softplus_heads": "trainable base, penalty, Softplus heads",
    "trainable_base_penalty_below": "trainable base, penalty below it",
}
_COLORS = {
    "no_penalty": "#a9aeb4",
    "penalty": "#1f6feb",
    "penalty_without_l1": "#a5c8fa",
    "trainable_base_no_penalty": "#d8d2c4",
    "trainable_base_relu_heads": "#e3c98b",
    "trainable_base_softplus_heads": "#c9a24c",
}
_OTHERS = ("#8cb369", "#bc4b51", "#5b8e7d", "#8e7dbe")  # arms of users


def arm_label(name: str) -> str:
    """Return the label of an arm; arms of users are shown by name."""
    return _LABELS.get(name, name.replace("_", " "))


def arm_color(name: str, number: int) -> str:
    """Return the color of an arm; those of users by their number."""
    return _COLORS.get(name) or _OTHERS[number % len(_OTHERS)]
