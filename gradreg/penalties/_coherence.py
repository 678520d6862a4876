"""How coherent the gradients of several models are, dominated by the pair that agrees most."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from gradreg.errors import GradregError
from gradreg.penalties._alignment import alignment_matrix

__all__ = ["coherence"]


def coherence(gradients: Float[Tensor, "n heads *shape"], reduction: str = "mean", eps: float = 1e-12) -> Tensor:
    r"""A smooth maximum over pairs of cosines, $\log \sum_{i<j} \exp(u_i \cdot u_j)$ per example.

    $u_i = g_i / \sqrt{\lVert g_i \rVert^2 + \varepsilon}$. Lies between the largest cosine and that plus the logarithm of the
    number of pairs.

    Args:
        gradients: Gradients per example and head, `[n, K, *shape]`.
        reduction: `"mean"` or `"sum"` over examples, or `"none"`.
        eps: Added to the squared norm, in squared units of the gradients.

    Returns:
        A scalar, or `[n]`.

    Raises:
        GradregError: If the reduction is unknown or the shape does not fit.
        HeadsError: If there is a single head.

    References:
        Kariyappa, Qureshi 2019, arXiv 1901.09981.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.penalties.coherence(torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]]))  # cosines 0, 0, -1
        tensor(0.8620)
    """
    if reduction not in ("mean", "sum", "none"):
        raise GradregError(f"reduction={reduction!r}; allowed are 'mean', 'sum' and 'none'.")
    matrix = alignment_matrix(gradients, "cosine", eps)
    heads = matrix.shape[1]
    first, second = torch.triu_indices(heads, heads, offset=1, device=matrix.device)
    values = matrix[:, first, second].logsumexp(1)
    if reduction == "none":
        return values
    return values.mean() if reduction == "mean" else values.sum()
