"""Checkpoints: model weights that TracIn can read, and the state from which a run resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gradreg as gr
from gradreg.experiments.files import write_atomically

__all__ = ["ArmFolder"]


class ArmFolder:
    """The files of one arm: `checkpoints/step-<step>.safetensors`, `resume.pt` and, at the end, `results.json`.

    The metadata of a checkpoint hold `arm`, `step` (optimizer steps done) and `learning_rate` (of the last step), as
    strings, which is what the format allows.
    """

    def __init__(self, path: Path, arm: str) -> None:
        self.path = path
        self.arm = arm
        self.results = path / "results.json"

    def checkpoint(self, step: int) -> Path:
        """Return the path of the weights after that many steps."""
        return self.path / "checkpoints" / f"step-{step:06d}.safetensors"

    def save(self, model: nn.Module, state: dict[str, Any], learning_rate: float) -> None:
        """Save the weights, then the state that refers to them; either is whole or absent.

        Args:
            model: Its state dict is saved.
            state: What else is needed to resume, with the key `"step"`.
            learning_rate: Goes into the metadata.

        Raises:
            NonFiniteLossError: If a weight is not finite; nothing is saved then.
        """
        step = int(state["step"])
        weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
        broken = [name for name, value in weights.items() if not torch.isfinite(value).all()]
        if broken:
            raise gr.errors.NonFiniteLossError(
                f"Arm {self.arm!r}, after step {step}: {len(broken)} weights are NaN or infinite, the first in "
                f"{broken[0]!r}. No checkpoint was saved. Lower the learning rate or the weight of the penalty."
            )
        metadata = {"format": "pt", "arm": self.arm, "step": str(step), "learning_rate": repr(learning_rate)}
        write_atomically(self.checkpoint(step), lambda path: save_file(weights, path, metadata=metadata))
        write_atomically(self.path / "resume.pt", lambda path: torch.save(state, path))

    def reached(self) -> int:
        """Return the step of the last checkpoint, 0 when there is none."""
        loaded = self.load()
        return int(loaded[1]["step"]) if loaded else 0

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read weights and state of the last checkpoint, or None when there is none."""
        file = self.path / "resume.pt"
        if not file.exists():
            return None
        state = torch.load(file, map_location="cpu", weights_only=True)
        return load_file(self.checkpoint(int(state["step"]))), state
