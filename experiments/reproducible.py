"""Random numbers and determinism: one place to set them, one to save and restore them."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["batch_indices", "deterministic", "random_state", "restore_random_state", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def deterministic(threads: int | None) -> Iterator[None]:
    """Use deterministic kernels and a fixed number of threads inside; restore what was set before.

    Sums depend on the number of threads, so it belongs to what makes two runs equal.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    before = torch.get_num_threads()
    algorithms, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark = torch.backends.cudnn.benchmark
    try:
        if threads:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True, warn_only=True)  # say so, but let a user's own model run
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark


def random_state() -> dict[str, Any]:
    """Collect the states of all generators, as tensors and plain values that torch.load reads safely."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set all generators to a collected state."""
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def batch_indices(seed: int, step: int, examples: int, size: int) -> Tensor:
    """Return the examples of one step: every epoch is a new permutation, the last short batch is left out.

    A pure function of its arguments, so a resumed run needs no position in the data. All arms see the same batches.
    """
    per_epoch = examples // size
    epoch, position = divmod(step, per_epoch)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(examples, generator=generator)[position * size : (position + 1) * size]
