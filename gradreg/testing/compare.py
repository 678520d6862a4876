"""Comparing tables of gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["assert_same"]

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float | None = None) -> None:
    """Demand the same keys, shapes and dtypes, and values that are equal up to rounding.

    Args:
        found: Gradients by key.
        expected: The truth.
        tolerance: Largest difference relative to the largest value of the whole table; by default 1e-10 in float64,
            1e-5 in float32 and 5e-2 in bfloat16.

    Raises:
        AssertionError: If they differ; the worst entry of every differing key is named.

    Example:
        >>> import torch
        >>> from gradreg.testing.compare import assert_same
        >>> assert_same({"inputs": torch.ones(2)}, {"inputs": torch.ones(2)})
    """
    if found.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        raise AssertionError(f"The keys differ: missing {missing}, unexpected {extra}.")
    scale = max((float(value.detach().abs().max()) for value in expected.values() if value.numel()), default=0.0)
    problems = []
    for key, truth in expected.items():
        value = found[key]
        if value.shape != truth.shape or value.dtype != truth.dtype:
            problems.append(f"{key}: {value.dtype} {tuple(value.shape)}, expected {truth.dtype} {tuple(truth.shape)}")
            continue
        if not truth.numel():
            continue
        allowed = (tolerance if tolerance is not None else _TOLERANCES[truth.dtype]) * scale + 1e-14
        difference = (value.detach() - truth.detach()).abs().nan_to_num(nan=torch.inf)
        worst = int(difference.argmax())
        if float(difference.max()) > allowed:
            where = tuple(int(index) for index in torch.unravel_index(torch.tensor(worst), truth.shape))
            got, wanted = float(value.flatten()[worst]), float(truth.flatten()[worst])
            problems.append(f"{key}{list(where)}: {got:.12g}, expected {wanted:.12g}")
    if problems:
        raise AssertionError("Gradients differ:\n  " + "\n  ".join(problems))
