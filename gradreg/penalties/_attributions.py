"""What attributions shall look like: smooth, or on few features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradreg.errors import GradregError
from gradreg.penalties._precision import precise

__all__ = ["gini", "total_variation"]


def total_variation(attributions: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    r"""Sum of absolute differences between neighbors, $\sum_{\text{axes}} \sum_j \lvert \phi_{j+1} - \phi_j \rvert$, per example.

    Args:
        attributions: `[n, *shape]`.
        axes: The axes along which entries are neighbors. None: the only axis of `[n, d]`, else all behind the second (channels
            are no neighbors).

    Returns:
        `[n]`.

    Raises:
        GradregError: If there is no such axis.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.penalties.total_variation(torch.tensor([[1.0, 3.0, 2.0]]))
        tensor([3.])
    """
    if axes is None:
        axes = (1,) if attributions.dim() == 2 else range(2, attributions.dim())
    if not axes or any(not 1 <= axis < attributions.dim() for axis in axes):
        raise GradregError(
            f"axes={tuple(axes)}; attributions of shape {tuple(attributions.shape)} have axes 1 to {attributions.dim() - 1}."
        )
    values = precise(attributions)
    return torch.stack([values.diff(dim=axis).abs().flatten(1).sum(1) for axis in axes]).sum(0)


def gini(magnitudes: Tensor, eps: float = 1e-12) -> Tensor:
    r"""Gini coefficient of non-negative values.

    $\sum_{ij} \lvert a_i - a_j \rvert / (2 p \sum_i a_i)$: 0 for equal ones, 1 for one alone.

    Args:
        magnitudes: `[p]`.
        eps: Added to the sum, so that zeros give 0.

    Returns:
        A scalar.

    Raises:
        GradregError: If this is no vector.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.penalties.gini(torch.tensor([0.0, 0.0, 0.0, 1.0])), gr.penalties.gini(torch.ones(4))
        (tensor(0.7500), tensor(0.))
    """
    if magnitudes.dim() != 1 or not len(magnitudes):
        raise GradregError(f"gini() takes a vector, found shape {tuple(magnitudes.shape)}.")
    ordered, p = precise(magnitudes).sort().values, len(magnitudes)
    # the sum over pairs, by rank: the i-th smallest is subtracted p - i times and added i - 1 times
    ranks = torch.arange(1 - p, p, 2, dtype=ordered.dtype, device=ordered.device)
    return (ranks * ordered).sum() / (p * (ordered.sum() + eps))
