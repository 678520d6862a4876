"""Parts of per-example gradients: a dense tensor, or a sum of outer products that is never written out unasked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

# A temporary of a product holds about this many numbers: measured as the best for gradients written out in blocks
_NUMBERS = 2**22

# What an elementwise pass over a number costs, in units of one multiply-add of a matrix product
_ELEMENTWISE = 16

# Gram matrices that several parameters of a layer share, by the memory of the two factors
Grams: TypeAlias = dict[tuple[int, ...], Tensor]


@dataclass(frozen=True)
class Dense:
    """Gradients written out, `[rows, *shape]`."""

    value: Tensor

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.value)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.value.numel() * self.value.element_size()

    def select(self, rows: slice | Tensor) -> Dense:
        """Return some rows."""
        return Dense(self.value[rows])

    def repeated(self, times: int) -> Dense:
        """Return every row several times, side by side."""
        return Dense(self.value.repeat_interleave(times, 0))

    def dense(self) -> Tensor:
        """Return the gradients, `[rows, *shape]`."""
        return self.value

    def block(self, rows: slice) -> Tensor:
        """Return some rows of the gradient seen as a matrix `[shape[0], rest]`."""
        return self.value[:, rows] if self.value.dim() > 1 else self.value

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return `left @ G @ right.T`, G as a matrix `[shape[0], rest]`."""
        matrix = self.value.reshape(self.rows, self.value.shape[1] if self.value.dim() > 1 else 1, -1)
        return left @ matrix @ right.T


@dataclass(frozen=True)
class Outer:
    r"""Gradients $G_i = \sum_t l_{it} r_{it}^\top$, one term per position t.

    Attributes:
        left: `[rows, T, q]`, or positions of ones `[rows, T]` of one-hot vectors of length q (embeddings).
        right: `[rows, T, p]`.
        shape: Of the parameter, `q * p` numbers.
    """

    left: Tensor
    right: Tensor
    shape: torch.Size

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.right)

    @property
    def positions(self) -> int:
        """T."""
        return self.right.shape[1]

    @property
    def one_hot(self) -> bool:
        """Whether the left side is given by the positions of its ones."""
        return self.left.dim() == 2

    @property
    def sizes(self) -> tuple[int, int]:
        """The sides q and p of the gradient as a matrix."""
        p = self.right.shape[2]
        return self.shape.numel() // p if p else 0, p

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(side.numel() * side.element_size() for side in (self.left, self.right))

    def select(self, rows: slice | Tensor) -> Outer:
        """Return some rows."""
        return Outer(self.left[rows], self.right[rows], self.shape)

    def repeated(self, times: int) -> Outer:
        """Return every row several times, side by side."""
        return Outer(self.left.repeat_interleave(times, 0), self.right.repeat_interleave(times, 0), self.shape)

    def dense(self) -> Tensor:
        """Write the gradients out, `[rows, *shape]`."""
        return self.block(slice(0, self.sizes[0])).reshape(self.rows, *self.shape)

    def block(self, rows: slice) -> Tensor:
        """Write out some rows of the gradient seen as a matrix `[q, p]`."""
        if not self.one_hot:
            left = self.left[:, :, rows].transpose(1, 2)
            return left * self.right if self.positions == 1 else torch.bmm(left, self.right)
        size, p = rows.stop - rows.start, self.sizes[1]
        written = self.right.new_zeros(self.rows * (size + 1), p)  # one place more, for the ones outside of the block
        inside = (self.left >= rows.start) & (self.left < rows.stop)
        places = (self.left - rows.start).where(inside, size)
        places = places + torch.arange(self.rows, device=self.left.device).unsqueeze(1) * (size + 1)
        written.index_add_(0, places.reshape(-1), self.right.reshape(-1, p))
        return written.reshape(self.rows, size + 1, p)[:, :size]

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return `left @ G @ right.T`, G as a matrix `[shape[0], rest]`."""
        lefts = left.T[self.left] if self.one_hot else self.left @ left.T
        return torch.bmm(lefts.transpose(1, 2), self.right @ right.T)


Piece: TypeAlias = Dense | Outer


def dense(value: Tensor) -> Dense:
    """Make the piece of gradients written out; those of half precision are taken to float32, so that squares do not overflow."""
    return Dense(value.float() if value.dtype in (torch.float16, torch.bfloat16) else value)


def outer(left: Tensor, right: Tensor, gradient: Tensor, shape: torch.Size) -> Piece:
    """Make the piece of a layer, without the positions at which the gradient of every row is zero: padding, unread tokens.

    Where there are so many positions that the gradient itself is smaller than the factors, it is written out: every product
    is then cheaper too.

    Args:
        left: `[rows, T, q]` or one-hot `[rows, T]`.
        right: `[rows, T, p]`.
        gradient: The side that is the gradient at the layer's output.
        shape: Of the parameter.
    """
    piece = Outer(left, right, shape)
    q, p = piece.sizes
    if not piece.one_hot and q * p < piece.positions * (q + p):
        return Dense(piece.dense())
    if piece.positions == 1:
        return piece
    active = gradient.detach().abs().amax((0, 2)).nonzero().flatten()
    return Outer(left[:, active], right[:, active], shape) if 0 < len(active) < piece.positions else piece


def joined(pieces: list[Piece]) -> list[Piece]:
    """Put pieces of the same kind together: terms of several calls are more positions of one sum."""
    dense = [piece for piece in pieces if isinstance(piece, Dense)]
    found: list[Piece] = []
    if dense:
        found.append(dense[0] if len(dense) == 1 else Dense(torch.stack([piece.value for piece in dense]).sum(0)))
    for one_hot in (False, True):
        outer = [piece for piece in pieces if isinstance(piece, Outer) and piece.one_hot == one_hot]
        if len(outer) == 1:
            found.append(outer[0])
        elif outer:
            left, right = torch.cat([o.left for o in outer], 1), torch.cat([o.right for o in outer], 1)
            found.append(Outer(left, right, outer[0].shape))
    return found


def add_products(total: Tensor, a: Piece, b: Piece, grams: Grams) -> None:
    """Add the inner products of all rows of `a` with all rows of `b` to `total`, `[a.rows, b.rows]`."""
    if isinstance(a, Outer) and isinstance(b, Outer) and _by_positions(a, b):
        for rows in _chunks(a.rows, b.rows * a.positions * b.positions):
            # Gram matrices of some of the rows are of no use to other parameters
            _add_by_positions(total[rows], a.select(rows), b, grams if rows == slice(0, a.rows) else {})
        return
    if isinstance(a, Outer) and isinstance(b, Outer) and a.one_hot and b.one_hot:
        a, b = _on_common_ones(a, b)
    if isinstance(a, Dense) and isinstance(b, Dense):
        total += gram(a.value.reshape(a.rows, -1), b.value.reshape(b.rows, -1), grams)
        return
    q, p = _matrix(a)
    for block in _chunks(q, (a.rows + b.rows) * p):
        total.addmm_(a.block(block).reshape(a.rows, -1), b.block(block).reshape(b.rows, -1).T)


def add_row_products(total: Tensor, a: Piece, b: Piece) -> None:
    """Add the inner product of every row of `a` with the same row of `b` to `total`, `[rows]`."""
    if a is b and isinstance(a, Outer) and a.positions == 1:
        lefts = 1.0 if a.one_hot else a.left.square().sum((1, 2))
        total += lefts * a.right.square().sum((1, 2))
        return
    if isinstance(a, Outer) and isinstance(b, Outer):
        q, p = a.sizes
        positions = a.positions * b.positions
        if positions * (p + (0 if a.one_hot or b.one_hot else q) + _ELEMENTWISE) <= (a.positions + b.positions) * q * p:
            for rows in _chunks(a.rows, positions):
                one, other = a.select(rows), b.select(rows)
                rights = torch.bmm(one.right, other.right.transpose(1, 2))
                total[rows] += (_row_lefts(one, other) * rights).sum((1, 2))
            return
    q, p = _matrix(a)
    for rows in _chunks(a.rows, q * p):
        written = a.select(rows).dense().flatten(1)
        counterpart = written if a is b else b.select(rows).dense().flatten(1)
        total[rows] += (written * counterpart).sum(1)


def gram(a: Tensor, b: Tensor, grams: Grams) -> Tensor:
    """Return `a @ b.T`, computed once for factors that several parameters share (a weight and its bias)."""
    key = (a.data_ptr(), *a.shape, b.data_ptr(), *b.shape)
    if key not in grams:
        grams[key] = a @ b.T
    return grams[key]


def _matrix(piece: Piece) -> tuple[int, int]:
    """Return the sides of the gradient seen as a matrix `[shape[0], rest]`."""
    shape = piece.shape if isinstance(piece, Outer) else piece.value.shape[1:]
    if isinstance(piece, Outer):
        return piece.sizes
    q = shape[0] if shape else 1
    return q, shape.numel() // q if q else 0


def _by_positions(a: Outer, b: Outer) -> bool:
    """Whether products of positions are cheaper than writing the gradients out, by counting multiply-adds."""
    q, p = a.sizes
    pairs, positions = a.rows * b.rows, a.positions * b.positions
    lefts = 0 if a.one_hot or b.one_hot else q
    by_positions = pairs * positions * (p + lefts + (_ELEMENTWISE if positions > 1 else 2))
    size = q * p
    if a.one_hot and b.one_hot:
        size = min(q, b.rows * b.positions) * p
        written_out = (a.rows + b.rows) * size
    else:
        written_out = (a.rows * a.positions + b.rows * b.positions) * q * p
    return by_positions <= written_out + pairs * size


def _add_by_positions(total: Tensor, a: Outer, b: Outer, grams: Grams) -> None:
    flat = (a.right.reshape(-1, a.right.shape[2]), b.right.reshape(-1, b.right.shape[2]))
    shape = (a.rows, a.positions, b.rows, b.positions)
    if a.positions == b.positions == 1:
        if not a.one_hot and not b.one_hot:
            left = (a.left.reshape(a.rows, -1), b.left.reshape(b.rows, -1))
            total.addcmul_(flat[0] @ flat[1].T, gram(*left, grams))
            return
        total.addcmul_(flat[0] @ flat[1].T, _lefts(a, b).reshape(a.rows, b.rows))
        return
    total += (flat[0] @ flat[1].T).reshape(shape).mul_(_lefts(a, b).reshape(shape)).sum((1, 3))


def _lefts(a: Outer, b: Outer) -> Tensor:
    """Return the inner products of left sides, `[a.rows * T_a, b.rows * T_b]`."""
    if a.one_hot and b.one_hot:
        return (a.left.reshape(-1, 1) == b.left.reshape(1, -1)).to(a.right.dtype)
    if a.one_hot:
        return b.left.reshape(-1, b.left.shape[2])[:, a.left.reshape(-1)].T
    if b.one_hot:
        return a.left.reshape(-1, a.left.shape[2])[:, b.left.reshape(-1)]
    return a.left.reshape(-1, a.left.shape[2]) @ b.left.reshape(-1, b.left.shape[2]).T


def _row_lefts(a: Outer, b: Outer) -> Tensor:
    """Return the inner products of left sides row by row, `[rows, T_a, T_b]`."""
    if a.one_hot and b.one_hot:
        return (a.left.unsqueeze(2) == b.left.unsqueeze(1)).to(a.right.dtype)
    if a.one_hot:
        return b.left.gather(2, a.left.unsqueeze(1).expand(-1, b.positions, -1)).transpose(1, 2)
    if b.one_hot:
        return a.left.gather(2, b.left.unsqueeze(1).expand(-1, a.positions, -1))
    return torch.bmm(a.left, b.left.transpose(1, 2))


def _on_common_ones(a: Outer, b: Outer) -> tuple[Outer, Outer]:
    """Renumber one-hot sides by the ones of `b`; those of `a` that `b` lacks meet nothing and go to a spare place."""
    common = b.left.unique()
    place = torch.searchsorted(common, a.left.contiguous()).clamp(max=len(common) - 1)
    spare = len(common)
    shape = torch.Size((spare + 1, a.right.shape[2]))
    return (
        Outer(place.where(common[place] == a.left, spare), a.right, shape),
        Outer(torch.searchsorted(common, b.left.contiguous()), b.right, shape),
    )


def _chunks(rows: int, numbers: int) -> Iterator[slice]:
    """Cut rows so that a temporary of `numbers` numbers per row stays small."""
    step = max(1, _NUMBERS // max(1, numbers))
    if step >= rows:
        yield slice(0, rows)
        return
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
