"""What a run ran on: versions, hardware, state of the code."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gradreg.errors import GradregError

__all__ = ["choose_device", "describe", "gradreg_version"]


def gradreg_version() -> str:
    """Return the installed version."""
    try:
        return metadata.version("gradreg")
    except metadata.PackageNotFoundError:  # used from a clone that was never installed
        return "unknown"


def choose_device(name: str) -> torch.device:
    """Return the device of that name; `"auto"` is the first accelerator, or else the CPU.

    Raises:
        GradregError: If this computer has none such.
    """
    if name != "auto":
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError, NotImplementedError) as problem:  # each backend in its own way
            lines = str(problem).strip().splitlines() or [type(problem).__name__]
            raise GradregError(
                f"device: {name!r} is not to be had ({lines[0]}); allowed are auto, cpu, and the accelerators of this computer, "
                "such as cuda, cuda:1 and mps."
            ) from problem
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def describe(device: torch.device) -> dict[str, Any]:
    """Collect versions, hardware and git state."""
    versions = {"gradreg": gradreg_version(), "python": platform.python_version()}
    for package in ("torch", "numpy", "hydra-core", "omegaconf", "scikit-learn"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    hardware = {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    return {"versions": versions, "hardware": hardware, "git": _git_state()}


def _git_state() -> dict[str, Any] | None:
    """Return commit and cleanness of the clone this code lies in, or None outside of one (a wheel)."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:  # some other repository around a wheel
        return None
    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "clean": status == "" if status is not None else None}
