"""What methods that draw numbers are given."""

from __future__ import annotations

import torch

from gradreg.errors import GradregError

__all__ = ["check_samples", "generator_of"]


def check_samples(n_samples: object, least: int) -> None:
    """Refuse what is no number of draws.

    Raises:
        GradregError: If it is no integer, or too small.
    """
    if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < least:
        raise GradregError(f"n_samples={n_samples!r}; allowed are integers from {least}.")


def generator_of(generator: object) -> torch.Generator:
    """Return the generator, or one of its own with seed 0.

    Raises:
        GradregError: If it is none.
    """
    if generator is None:
        return torch.Generator().manual_seed(0)
    if not isinstance(generator, torch.Generator):
        raise GradregError(
            f"generator={generator!r}; allowed are None and a torch.Generator, torch.Generator().manual_seed(0)."
        )
    return generator
