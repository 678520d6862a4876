r"""Random projections of per-example gradients: off by default, and never biased.

A projection is a random linear map $P$ with $\mathbb E[P^\top P] = I$, so inner products of projected gradients have the
exact one as their mean, for every shape of layer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gradreg.errors import GradregError
from gradreg.tracin._signs import places, sign_matrix, stream_key

__all__ = ["BoundProjection", "DenseProjection", "Projection", "RowGradients", "TwoSidedProjection"]

_BLOCK_NUMBERS = 2**22  # numbers of a random matrix held at a time: 16 MiB in float32


class RowGradients(Protocol):
    """Gradients of rows with respect to named parameters, such as `Factors`."""

    def __len__(self) -> int: ...

    def gradient(self, name: str) -> Tensor: ...

    def two_sided(self, name: str, left: Tensor, right: Tensor) -> Tensor: ...


class BoundProjection(ABC):
    """A projection for parameters of known shapes: called with gradients of rows, gives `[rows, size]`."""

    size: int

    @abstractmethod
    def __call__(self, rows: RowGradients) -> Tensor:
        """Return the projected gradients, `[rows, size]`."""


@dataclass(frozen=True)
class Projection(ABC):
    """A seeded random projection; equal fields give equal numbers on every machine and for every batch size."""

    @abstractmethod
    def bind(
        self,
        shapes: Mapping[str, Sequence[int]],
        *,
        stream: object = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> BoundProjection:
        """Return the projection of gradients with these shapes; another `stream` gives an independent matrix."""

    def describe(self) -> dict[str, Any]:
        """Return all that decides the numbers, as plain values."""
        return {"kind": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class TwoSidedProjection(Projection):
    r"""Project the gradient $G$ of every weight matrix from both sides, $L G R^\top$, layer by layer.

    $L$ (`[left, outputs]`) and $R$ (`[right, inputs]`) hold independent signs over $\sqrt{\text{left}}$ and
    $\sqrt{\text{right}}$. Since $G = \sum_t d_t a_t^\top$, only $L d_t$ and $R a_t$ are ever computed: the cost is that of
    a narrow layer, and no whole gradient is built. A side that is no longer than its target is kept as it is, and what
    has at most `left * right` numbers (biases, scales) is kept whole. A weight of more than two axes is read as the matrix
    `[shape[0], rest]`. The result has at most `left * right` numbers per parameter.

    Args:
        left: Numbers that the output side is projected to.
        right: Numbers that the input side is projected to.
        seed: Of the signs.

    Raises:
        GradregError: If a size is below 1.

    References:
        Choe et al. 2024, "What is Your Data Worth to GPT?", arXiv 2405.13954, section 3.1.

    Example:
        >>> import torch
        >>> from gradreg.tracin import TwoSidedProjection
        >>> TwoSidedProjection(left=4, right=8).bind({"weight": (32, 32), "bias": (32,)}).size
        64
    """

    left: int = 16
    right: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        _check_counts(self, ("left", "right"))

    def bind(
        self,
        shapes: Mapping[str, Sequence[int]],
        *,
        stream: object = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> BoundProjection:
        """Return the projection of gradients with these shapes."""
        return _BoundTwoSided(self, shapes, stream, dtype, device)


@dataclass(frozen=True)
class DenseProjection(Projection):
    r"""Project all parameters together to `size` numbers, by signs generated block by block.

    `kind="rademacher"`: every entry of $P$ is $\pm 1/\sqrt{\text{size}}$. `kind="sparse"`: every coordinate goes to
    `nonzeros` of the numbers with $\pm 1/\sqrt{\text{nonzeros}}$, at `nonzeros` instead of `size` operations per
    coordinate. Whole gradients of a batch are built, one parameter at a time; $P$ itself is never held.

    Args:
        size: Numbers per example.
        seed: Of the signs.
        kind: `"rademacher"` or `"sparse"`.
        nonzeros: Of every coordinate, for `"sparse"`.

    Raises:
        GradregError: If a size is below 1, or the kind is unknown.

    References:
        Achlioptas 2003, "Database-friendly random projections", theorem 1.1; Kane and Nelson 2014, "Sparser
        Johnson-Lindenstrauss transforms", arXiv 1012.1577, section 1.1 (block construction).

    Example:
        >>> from gradreg.tracin import DenseProjection
        >>> DenseProjection(size=128).bind({"weight": (32, 32), "bias": (32,)}).size
        128
    """

    size: int = 512
    seed: int = 0
    kind: str = "rademacher"
    nonzeros: int = 4

    def __post_init__(self) -> None:
        _check_counts(self, ("size", "nonzeros"))
        if self.kind not in ("rademacher", "sparse"):
            raise GradregError(f"kind={self.kind!r} is not a projection; allowed are 'rademacher' and 'sparse'.")
        if self.kind == "sparse" and self.nonzeros > self.size:
            raise GradregError(f"nonzeros={self.nonzeros} is more than size={self.size}; allowed are 1 to {self.size}.")

    def bind(
        self,
        shapes: Mapping[str, Sequence[int]],
        *,
        stream: object = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> BoundProjection:
        """Return the projection of gradients with these shapes."""
        return _BoundDense(self, shapes, stream, dtype)


class _BoundTwoSided(BoundProjection):
    def __init__(
        self,
        spec: TwoSidedProjection,
        shapes: Mapping[str, Sequence[int]],
        stream: object,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._sides: dict[str, tuple[Tensor, Tensor] | Tensor | None] = {}
        self._sizes: dict[str, int] = {}
        budget = spec.left * spec.right
        for name, shape in shapes.items():
            numel = math.prod(shape)
            rows = int(shape[0]) if shape else 1

            def side(which: str, length: int, target: int, name: str = name) -> Tensor:
                if length <= target:
                    return torch.eye(length, dtype=dtype, device=device)
                key = stream_key(spec.seed, stream, name, which)
                return (sign_matrix(key, 0, length, target, dtype).T / math.sqrt(target)).contiguous().to(device)

            if numel <= budget:
                self._sides[name], self._sizes[name] = None, numel
            elif len(shape) < 2:
                self._sides[name], self._sizes[name] = side("whole", numel, budget), budget
            else:
                pair = (side("left", rows, spec.left), side("right", numel // rows, spec.right))
                self._sides[name], self._sizes[name] = pair, len(pair[0]) * len(pair[1])
        self.size = sum(self._sizes.values())

    def __call__(self, rows: RowGradients) -> Tensor:
        parts = []
        for name, sides in self._sides.items():
            if isinstance(sides, tuple):
                part = rows.two_sided(name, *sides).flatten(1)
            else:
                part = rows.gradient(name).reshape(len(rows), -1)
                part = part if sides is None else part @ sides.T
            parts.append(part)
        return torch.cat(parts, dim=1)


class _BoundDense(BoundProjection):
    def __init__(
        self, spec: DenseProjection, shapes: Mapping[str, Sequence[int]], stream: object, dtype: torch.dtype
    ) -> None:
        self.size = spec.size
        self._spec = spec
        self._dtype = dtype
        self._numel = {name: math.prod(shape) for name, shape in shapes.items()}
        self._keys = {name: stream_key(spec.seed, stream, name, spec.kind) for name in shapes}

    def __call__(self, rows: RowGradients) -> Tensor:
        spec, result = self._spec, None
        for name, numel in self._numel.items():
            gradient = rows.gradient(name).reshape(len(rows), -1)
            if result is None:
                # numbers first: sparse signs add whole rows
                result = gradient.new_zeros(spec.size, len(rows), dtype=self._dtype)
            width = spec.size if spec.kind == "rademacher" else max(len(rows), spec.nonzeros)
            step = max(1, _BLOCK_NUMBERS // width)
            for start in range(0, numel, step):
                stop = min(start + step, numel)
                block = gradient[:, start:stop].to(self._dtype)
                if spec.kind == "rademacher":
                    signs = sign_matrix(self._keys[name], start, stop, spec.size, self._dtype)
                    result.addmm_(signs.to(block.device).T, block.T)
                    continue
                where, signs = places(self._keys[name], start, stop, spec.size, spec.nonzeros)
                where, signs, columns = where.to(block.device), signs.to(block), block.T.contiguous()
                for part in range(spec.nonzeros):
                    result.index_add_(0, where[:, part], columns * signs[:, part, None])
        assert result is not None, "no parameters"
        scale = math.sqrt(spec.size if spec.kind == "rademacher" else spec.nonzeros)
        return (result / scale).T.contiguous()


def _check_counts(spec: object, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GradregError(f"{name}={value!r} of {type(spec).__name__}; allowed are the integers 1, 2, 3, ...")
