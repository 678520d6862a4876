"""Which rows a DataLoader visits."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from gradreg.errors import BatchError, GradregWarning, warn

__all__ = ["visited_rows"]


def visited_rows(loader: DataLoader[Any]) -> list[int] | None:
    """Return the rows that a custom sampler selects, in the order of the dataset; None when it visits all.

    The samplers that torch makes from `shuffle` and `batch_size` visit all; `drop_last` leaves out rows at random, which is
    for training, and is ignored.

    Raises:
        BatchError: If a custom sampler has no length, or gives rows that the dataset lacks.
    """
    batches: Any = loader.batch_sampler
    stock = type(batches) is BatchSampler
    source: Any = batches.sampler if stock else batches
    if stock and isinstance(source, (SequentialSampler, RandomSampler)):
        return None
    if not hasattr(source, "__len__"):
        raise BatchError(
            f"The sampler {type(source).__name__} has no length, so its rows cannot be listed. Give the dataset itself, or a "
            "Subset of it."
        )
    generator = getattr(source, "generator", None)
    state = None if generator is None else generator.get_state()
    seen = {int(row) for item in source for row in (item if not stock else (item,))}
    if generator is not None:
        generator.set_state(state)
    total = len(loader.dataset)  # type: ignore[arg-type]  # a map-style dataset
    outside = sorted(row for row in seen if not 0 <= row < total)
    if outside:
        raise BatchError(f"The sampler gives row {outside[0]}; the dataset has {total} rows.")
    if len(seen) == total:
        return None
    warn(
        f"The {type(source).__name__} of the DataLoader visits {len(seen)} of {total} rows; these are scored, in the order of "
        "the dataset. Give the dataset itself for all of them, or a Subset.",
        GradregWarning,
    )
    return sorted(seen)
