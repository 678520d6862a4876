"""From rows of a dataset to a batch: stacking, and right padding of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradreg.errors import BatchError
from gradreg.scalars._outputs import IGNORED_LABEL

__all__ = ["collate_samples"]

_RENAMED = {"label": "labels", "label_ids": "labels"}  # as the collators of HF do


def collate_samples(samples: Sequence[Any]) -> Any:
    """Stack rows; where they differ in length, pad on the right.

    A row is a tensor, an array, a number, a pair `(inputs, target)` or a mapping. Sequences of unequal lengths are padded
    with 0, and labels (the target of a pair, `"labels"` of a mapping) with -100. Columns of a mapping that hold no numbers
    (texts) are left out, and `"label"` is read as `"labels"`.

    Raises:
        BatchError: If rows cannot be brought to one shape.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        names = [name for name in first if _is_numeric(first[name])]
        lacking = [(row, name) for row, sample in enumerate(samples) for name in names if name not in sample]
        if lacking:
            raise BatchError(
                f"A row (number {lacking[0][0]} of a chunk) lacks the column {lacking[0][1]!r}, which others have."
            )
        columns = {name: [sample[name] for sample in samples] for name in names}
        return {
            _RENAMED.get(name, name) if "labels" not in columns else name: _stack(values, name)
            for name, values in columns.items()
        }
    if isinstance(first, (tuple, list)) and not _is_numeric(first):
        columns_ = list(zip(*samples, strict=True))
        names = ["inputs", "targets"] if len(columns_) == 2 else [f"inputs[{i}]" for i in range(len(columns_))]
        return tuple(_column(values, name) for values, name in zip(columns_, names, strict=True))
    return _column(samples, "inputs")


def _column(values: Sequence[Any], name: str) -> Any:
    if isinstance(values[0], (Mapping, tuple, list)) and not _is_numeric(values[0]):
        return collate_samples(values)
    return _stack(values, name)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray, np.generic, bool, int, float)):
        return not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind in "biuf"
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, (bool, int, float, list)) and _is_numeric(item) for item in value)
    return False


def _stack(values: Sequence[Any], name: str) -> Tensor:
    try:
        tensors = [torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as problem:
        raise BatchError(
            f"A row of {name!r} is a {type(values[0]).__name__}, which is no tensor: {problem}. Give collate=, a function from "
            "a list of rows to a batch."
        ) from problem
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) == 1:
        return torch.stack(tensors)
    if len({shape[1:] for shape in shapes if shape}) != 1 or () in shapes:
        raise BatchError(
            f"Rows of {name!r} have the shapes {sorted(shapes)[:4]}; only the first axis may differ (it is padded). Give "
            "collate=, a function from a list of rows to a batch."
        )
    filler = IGNORED_LABEL if name in ("labels", "label", "label_ids", "targets") else 0
    if filler and tensors[0].is_floating_point():
        raise BatchError(
            f"{name!r} holds floating-point targets of unequal lengths {sorted(shapes)[:4]}; there is no number that means "
            "'ignore'. Give collate=, a function from a list of rows to a batch."
        )
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)
