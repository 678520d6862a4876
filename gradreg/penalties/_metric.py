"""Metrics: which directions of the inputs or features count when gradients are measured and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradreg.errors import GradregError
from gradreg.penalties._precision import full_precision, precise

__all__ = ["Metric", "as_metric"]


class Metric(nn.Module):
    r"""An inner product of gradients, $\langle u, v \rangle = u^\top M v$ with $M = A A^\top$.

    Data fill few directions of their space. A gradient may point off them, and heads can be made orthogonal there without any
    change of what they compute on data: no example ever moves in such a direction. A metric that is fitted on data
    compares gradients by what they say about moves that data make (the concern of the follow-up of the diversity paper,
    Teney, Peyrard, Abbasnejad 2022, arXiv 2207.02598; this is not its method).

    Gradients are multiplied by the factor, $A^\top g$, before any penalty, so every norm, dot product and cosine becomes the one
    of $M$. With coordinates $z$ in which inputs are $x = A z + \dots$, $A^\top g$ is the gradient with respect to $z$.

    Args:
        factor: A, `[d, r]`, where d is the number of entries of one input or feature; `r < d` is of low rank.

    Raises:
        GradregError: If the factor is no finite floating-point matrix.

    Example:
        >>> import torch, gradreg as gr
        >>> features = torch.randn(100, 2) @ torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])  # a plane
        >>> metric = gr.penalties.Metric.pca(features, rank=2)
        >>> g = torch.tensor([[1.0, 0.0, 5.0]])  # mostly off the plane
        >>> torch.allclose(gr.penalties.norm(metric(g)), torch.tensor(1.0))
        True
    """

    factor: Tensor

    def __init__(self, factor: Float[Tensor, "d r"]) -> None:
        super().__init__()
        _check_matrix(factor, "factor")
        self.register_buffer("factor", factor.detach().clone())

    @classmethod
    def from_matrix(cls, matrix: Float[Tensor, "d d"]) -> Metric:
        """The metric of a symmetric, positive semidefinite matrix M; directions of eigenvalue 0 are left out.

        Args:
            matrix: M, `[d, d]`.

        Raises:
            GradregError: If it is not square, symmetric and positive semidefinite, or zero.
        """
        _check_matrix(matrix, "matrix")
        if matrix.shape[0] != matrix.shape[1]:
            raise GradregError(f"The matrix of a metric must be square, found {tuple(matrix.shape)}.")
        precise_matrix = matrix.detach().double()
        scale = float(precise_matrix.abs().max())
        if not torch.allclose(precise_matrix, precise_matrix.T, rtol=0, atol=1e-5 * scale):
            raise GradregError("The matrix of a metric must be symmetric.")
        values, vectors = torch.linalg.eigh((precise_matrix + precise_matrix.T) / 2)
        if float(values[0]) < -1e-6 * scale:
            raise GradregError(
                f"The matrix of a metric must be positive semidefinite; it has the eigenvalue {float(values[0]):.3g}."
            )
        kept = values > 1e-12 * max(scale, 1e-300)
        if not bool(kept.any()):
            raise GradregError("The matrix of a metric is zero: every gradient would vanish.")
        return cls((vectors[:, kept] * values[kept].sqrt()).to(matrix.dtype))

    @classmethod
    def pca(cls, features: Float[Tensor, "n ..."], rank: int, whiten: bool = False) -> Metric:
        r"""The metric of the leading principal directions $U$ of data, with variances $\Lambda$.

        `whiten=False`: $M = U U^\top$, the part of the gradient inside the data's subspace. `whiten=True`: $M = U \Lambda
        U^\top$, the gradient with respect to whitened coordinates $z = \Lambda^{-1/2} U^\top (x - \bar x)$: what one standard
        deviation along a direction changes.

        Args:
            features: Inputs or features of many examples, `[n, *shape]`; the axes behind n are flattened.
            rank: The number of directions, r.
            whiten: Weight directions by their standard deviation.

        Raises:
            GradregError: If the data do not span so many directions.
        """
        flat = _flat(features)
        _, deviations, directions = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
        spanned = int((deviations > 1e-10 * deviations.max().clamp(min=1e-300)).sum())
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= spanned:
            raise GradregError(f"rank={rank!r}; {flat.shape[0]} examples span {spanned} directions of {flat.shape[1]}.")
        factor = directions[:rank].T
        if whiten:
            factor = factor * (deviations[:rank] / (flat.shape[0] - 1) ** 0.5)
        return cls(factor.to(features.dtype))

    @classmethod
    def within_class_whitening(
        cls, features: Float[Tensor, "n ..."], labels: Int[Tensor, " n"], shrinkage: float = 0.1
    ) -> Metric:
        r"""The metric $M = \Sigma_w$: gradients with respect to features that are whitened within classes.

        $\Sigma_w = (1 - s)\,S + s\,\frac{\mathrm{tr} S}{d} I$, $S$ the covariance around the class means (divided by n). What
        data of one class do not vary in counts little, however much the gradient points there.

        Args:
            features: Features of many examples, `[n, *shape]`; the axes behind n are flattened.
            labels: Their classes, `[n]`.
            shrinkage: s in [0, 1]: 0 takes the covariance as it is, 1 gives a multiple of the identity.

        Raises:
            GradregError: If labels or shrinkage do not fit, or no class varies.
        """
        flat = _flat(features)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != flat.shape[:1]:
            raise GradregError(f"labels must be an integer tensor of shape ({flat.shape[0]},).")
        if not 0 <= shrinkage <= 1:
            raise GradregError(f"shrinkage={shrinkage!r}; it must lie between 0 and 1.")
        centered = flat.clone()
        for value in labels.unique():
            centered[labels == value] -= flat[labels == value].mean(0)
        covariance = centered.T @ centered / flat.shape[0]
        spread = covariance.diagonal().mean()
        if not bool(spread > 0):
            raise GradregError("No class varies: every class has one example, or equal ones.")
        shrunk = (1 - shrinkage) * covariance
        shrunk.diagonal().add_(shrinkage * spread)
        return cls.from_matrix(shrunk.to(features.dtype))

    @property
    def size(self) -> int:
        """The number of entries of one gradient, d."""
        return int(self.factor.shape[0])

    def forward(self, gradients: Tensor) -> Tensor:
        r"""Return $A^\top g$: the trailing axes, of d entries together, become one of r. Low precision becomes float32.

        Raises:
            GradregError: If the gradients have no trailing axes of d entries.
        """
        flat = self._matched(precise(gradients))
        with full_precision(flat):
            return flat @ self.factor.to(flat)

    def shaped(self, gradients: Tensor) -> Tensor:
        r"""Return $M^{1/2} g$ in the shape of $g$, for penalties that look at single entries (masks, attributions).

        It has the same norm as `metric(g)`; for a projection, $M = U U^\top$, it is the projected gradient.

        Raises:
            GradregError: If the gradients have no trailing axes of d entries.
        """
        flat = self._matched(precise(gradients))
        with full_precision(flat):
            left, scale, _ = torch.linalg.svd(self.factor.to(flat), full_matrices=False)
            result: Tensor = (((flat @ left) * scale) @ left.T).reshape(gradients.shape)
        return result

    def _matched(self, gradients: Tensor) -> Tensor:
        entries = 1
        for position in range(gradients.dim() - 1, 0, -1):
            entries *= gradients.shape[position]
            if entries == self.size:
                return gradients.flatten(position)
        raise GradregError(
            f"The metric is for gradients of {self.size} entries; these are {tuple(gradients.shape)}. It must be fitted on what "
            "the penalty differentiates with respect to."
        )

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"d={self.factor.shape[0]}, r={self.factor.shape[1]}"


MetricLike: TypeAlias = Metric | Tensor | None


def as_metric(metric: MetricLike) -> Metric | None:
    """Return a metric from what `metric=` accepts: None (the plain inner product), a `Metric`, a matrix or a factor.

    Args:
        metric: A square tensor is taken as M, one `[d, r]` with `r < d` as a factor.

    Raises:
        GradregError: If it is none of these, or the matrix is not positive semidefinite.

    Example:
        >>> import torch
        >>> from gradreg.penalties import as_metric
        >>> as_metric(torch.eye(3)[:, :2])
        Metric(d=3, r=2)
    """
    if metric is None or isinstance(metric, Metric):
        return metric
    if not isinstance(metric, Tensor):
        raise GradregError(
            f"metric is a {type(metric).__name__}; allowed are None, a Metric, a matrix [d, d] or a factor [d, r]."
        )
    _check_matrix(metric, "metric")
    return Metric.from_matrix(metric) if metric.shape[0] == metric.shape[1] else Metric(metric)


def under(metric: Callable[[Tensor], Tensor] | None, gradients: Tensor) -> Tensor:
    """Return gradients as a metric sees them; as they are without one."""
    return gradients if metric is None else metric(gradients)


def _check_matrix(value: object, name: str) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 2 or not value.numel():
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise GradregError(f"The {name} of a metric must be a floating-point matrix, found {found}.")
    if not bool(torch.isfinite(value).all()):
        raise GradregError(f"The {name} of a metric holds values that are not finite.")


def _flat(features: Tensor) -> Tensor:
    if not isinstance(features, Tensor) or not features.is_floating_point() or features.dim() < 2 or len(features) < 2:
        found = f"{features.dtype} {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise GradregError(
            f"features must be floating-point values of at least two examples, [n, *shape]; found {found}."
        )
    return features.detach().flatten(1).double()
