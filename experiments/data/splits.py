"""Data: what every source delivers, and the checks that all of them pass before work starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import gradreg as gr

__all__ = ["IN_DISTRIBUTION", "Data", "DataError", "batch_of", "check_layout", "halves"]

IN_DISTRIBUTION = "id"  # name of the set in which every part is predictive, as in training


class DataError(gr.errors.GradregError):
    """Data that cannot be read or cannot be right."""


@dataclass(frozen=True)
class Data:
    """Training set, and one validation and one test set per predictive part.

    Args:
        parts: Names of the parts (tiles) of which one alone is predictive in the set of that name.
        classes: Number of classes.
        train: Training set, all parts predictive.
        validation: Sets by part, where heads are chosen.
        test: Sets by part, and `IN_DISTRIBUTION` if there is one.
        upper_bounds: Training sets by part in which only that part is predictive; empty if there are none.
        selection: In words, where the validation sets come from.
        boxes: Where a part lies in the image, as top, left, height, width in pixels; for pictures, may be empty.
    """

    parts: tuple[str, ...]
    classes: int
    train: gr.Batch
    validation: dict[str, gr.Batch]
    test: dict[str, gr.Batch]
    upper_bounds: dict[str, gr.Batch]
    selection: str
    boxes: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)

    def to(self, device: torch.device) -> Data:
        """Return the same data on a device."""

        def move(sets: dict[str, gr.Batch]) -> dict[str, gr.Batch]:
            return {name: batch.to(device) for name, batch in sets.items()}

        return replace(
            self,
            train=self.train.to(device),
            validation=move(self.validation),
            test=move(self.test),
            upper_bounds=move(self.upper_bounds),
        )


def batch_of(
    where: str, inputs: Tensor, targets: Tensor, shape: tuple[int, ...] | None, classes: int | None
) -> gr.Batch:
    """Check one set and make it a batch.

    Args:
        where: Name of the set in messages.
        inputs: Floating-point tensor `[n, ...]`.
        targets: Integer labels `[n]`.
        shape: Shape of one example of the training set; None for the training set itself.
        classes: Number of classes, if known.

    Returns:
        The batch, inputs as float32 and targets as int64.

    Raises:
        DataError: If the set is empty or disagrees in shape, dtype, range or length.
    """
    check_layout(where, inputs, targets, shape)
    inputs = inputs.float()
    broken = ~torch.isfinite(inputs.flatten(1)).all(1)
    if broken.any():
        first = int(broken.nonzero()[0])
        raise DataError(
            f"{where}: {int(broken.sum())} of {len(inputs)} examples hold NaN, infinity or values beyond float32 "
            f"(first: example {first}). Clean them first."
        )
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or (classes is not None and high >= classes):
        allowed = f"0 to {classes - 1}" if classes else "0, 1, 2, ..."
        raise DataError(f"{where}: labels range from {low} to {high}; allowed are {allowed}.")
    return gr.Batch(inputs, targets.long())


def check_layout(where: str, inputs: Tensor, targets: Tensor, shape: tuple[int, ...] | None) -> None:
    """Check shapes and dtypes of one set; the values are not read, so tensors on the device `meta` will do.

    Raises:
        DataError: If the set is empty or disagrees in shape, dtype or length.
    """
    if inputs.dim() < 2:
        raise DataError(f"{where}: inputs have the shape {list(inputs.shape)}; expected [examples, ...features].")
    if inputs.numel() == 0:
        raise DataError(f"{where}: empty, the inputs have the shape {list(inputs.shape)}. Every set needs examples.")
    if targets.dim() != 1 or len(targets) != len(inputs):
        raise DataError(
            f"{where}: targets have the shape {list(targets.shape)}, inputs {list(inputs.shape)}; "
            f"expected one label per example, [{len(inputs)}]."
        )
    if not inputs.is_floating_point():
        raise DataError(f"{where}: inputs are {inputs.dtype}; expected floating point, for gradients need it.")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise DataError(f"{where}: targets are {targets.dtype}; expected integer class indices.")
    if shape is not None and tuple(inputs.shape[1:]) != shape:
        raise DataError(
            f"{where}: an example has the shape {list(inputs.shape[1:])}, one of the training set {list(shape)}."
        )


def halves(batch: gr.Batch) -> tuple[gr.Batch, gr.Batch]:
    """Split a test set into a half that chooses heads and a half that is reported.

    The examples alternate, because published sets are sorted by class.

    Raises:
        DataError: If there is only one example.
    """
    if len(batch) < 2:
        raise DataError("A test set with one example cannot be split into one half to choose heads and one to report.")
    # Every second pair of neighbors, so that sets whose classes alternate are halved within each class too.
    chosen = torch.arange(len(batch)) // 2 % 2 == 0 if len(batch) > 2 else torch.tensor([True, False])
    return batch[chosen], batch[~chosen]
