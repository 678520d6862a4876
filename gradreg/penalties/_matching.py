"""How far two sets of parameter gradients are apart, as dataset condensation measures it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gradreg.errors import GradregError
from gradreg.penalties._norms import cosine, squared_norm

__all__ = ["MATCHINGS", "gradient_distance"]

MATCHINGS = ("cosine_rows", "cosine", "squared")


def gradient_distance(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], distance: str = "cosine_rows", eps: float = 1e-12
) -> Tensor:
    r"""Distance of two gradients with respect to the same parameters.

    `cosine_rows`: $\sum_{\text{tensors}} \sum_{r} (1 - \cos(a_r, b_r))$ over output rows: $[o, \dots]$ is o rows, and tensors
    with one axis (biases, scales) do not count. `cosine`: $1 - \cos(a, b)$ of everything as one vector. `squared`:
    $\lVert a - b \rVert^2$. A vanishing row has cosine 0, so distance 1.

    Args:
        first: Gradients by parameter name.
        second: Gradients of the same names and shapes.
        distance: One of the three names.
        eps: Added to squared norms inside cosines.

    Returns:
        A scalar.

    Raises:
        GradregError: If names or shapes differ, the distance is unknown, or no tensor has rows.

    References:
        Zhao, Mopuri, Bilen 2021, arXiv 2006.05929 (`cosine_rows`).

    Example:
        >>> import torch, gradreg as gr
        >>> a, b = {"weight": torch.eye(2)}, {"weight": torch.tensor([[1.0, 0.0], [1.0, 0.0]])}
        >>> gr.penalties.gradient_distance(a, b)
        tensor(1.)
    """
    if distance not in MATCHINGS:
        raise GradregError(f"distance={distance!r}; allowed are {', '.join(map(repr, MATCHINGS))}.")
    shapes = {name: tuple(value.shape) for name, value in first.items()}
    if shapes != {name: tuple(value.shape) for name, value in second.items()}:
        raise GradregError("The two gradients differ in names or shapes: they are of different parameters.")
    if distance == "cosine":
        return 1 - cosine(first, second, eps=eps, leading=0)
    if distance == "squared":
        return squared_norm({name: value - second[name] for name, value in first.items()}, leading=0)
    rows = [
        (1 - cosine(value.flatten(1), second[name].flatten(1), eps=eps)).sum()
        for name, value in first.items()
        if value.dim() > 1
    ]
    if not rows:
        raise GradregError(
            'distance="cosine_rows" compares output rows, but all parameters have one axis; use "cosine" or "squared".'
        )
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total
