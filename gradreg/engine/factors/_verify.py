"""Whether the rules give what autograd gives, on the batch itself: one backward with a weight of its own for every row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradreg.engine.factors._pieces import Dense, Piece

# Parts of a double-precision model may compute in single precision, norms for example: sums then round differently
_SINGLE = torch.finfo(torch.float32).eps


def row_weights(scalars: Tensor) -> Tensor:
    """Return fixed weights of the shape of the scalars, no two the same, so that exchanged examples are noticed."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(scalars.shape, generator=generator, dtype=torch.float64)
    return weights.to(scalars.device, scalars.dtype)


def weighted_truth(scalars: Tensor, weights: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradients of the weighted sum of scalars; the graph is kept."""
    found = torch.autograd.grad(
        (scalars * weights).sum(),
        list(parameters.values()),
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return {name: g.to_dense() if g.is_sparse else g for name, g in zip(parameters, found, strict=True)}


def disagreeing(pieces: Mapping[str, list[Piece]], weights: Tensor, truth: Mapping[str, Tensor]) -> list[str]:
    """Return the parameters whose pieces, summed over rows with the weights, are not the truth."""
    scale = max((float(g.abs().max()) for g in truth.values() if g.numel()), default=0.0)
    names = []
    for name, expected in truth.items():
        rows = [piece.rows for piece in pieces[name]]
        if any(count != weights.numel() for count in rows):
            names.append(name)
            continue
        found = sum(_weighted(piece, weights.reshape(-1)).reshape(expected.shape) for piece in pieces[name])
        assert isinstance(found, Tensor)
        if not close(found, expected, scale, _SINGLE):
            names.append(name)
    return names


def close(found: Tensor, expected: Tensor, scale: float = 0.0, least_eps: float = 0.0) -> bool:
    """Whether gradients are equal up to rounding; `scale` is the largest number among those of all parameters."""
    found, expected = found.detach(), expected.detach()
    eps = max(torch.finfo(expected.dtype).eps, least_eps)
    if not expected.numel():
        return True
    largest = float(expected.abs().max())
    difference = float((found.to(expected) - expected).abs().max())
    return difference <= float(eps**0.6) * largest + 100 * float(eps) * scale


def _weighted(piece: Piece, weights: Tensor) -> Tensor:
    if isinstance(piece, Dense):
        return weights.to(piece.value.dtype) @ piece.value.reshape(piece.rows, -1)
    q, p = piece.sizes
    right = (piece.right * weights.to(piece.right.dtype)[:, None, None]).reshape(-1, p)
    if piece.one_hot:
        return right.new_zeros(q, p).index_add_(0, piece.left.reshape(-1), right)
    return piece.left.reshape(-1, q).T @ right
