"""Sums of outer products behave as the gradients that they stand for."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradreg.engine.factors import _pieces
from gradreg.engine.factors._pieces import Dense, Outer, Piece, add_products, add_row_products, joined, outer

KINDS = ("dense", "outer", "one hot")


def piece(kind: str, rows: int, positions: int, q: int, p: int) -> Piece:
    if kind == "dense":
        return Dense(torch.randn(rows, q, p).double())
    left = torch.randint(0, q, (rows, positions)) if kind == "one hot" else torch.randn(rows, positions, q).double()
    return Outer(left, torch.randn(rows, positions, p).double(), torch.Size((q, p)))


def written(one: Piece) -> Tensor:
    """Write a piece out with a loop."""
    if isinstance(one, Dense):
        return one.value
    rows = []
    for i in range(one.rows):
        total = torch.zeros(one.shape).double()
        for t in range(one.positions):
            left = torch.eye(one.shape[0]).double()[one.left[i, t]] if one.one_hot else one.left[i, t]
            total = total + torch.outer(left, one.right[i, t])
        rows.append(total)
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.sampled_from([*combinations_with_replacement(KINDS, 2), ("one hot", "outer"), ("outer", "dense")]),
    rows=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    positions=st.tuples(st.integers(0, 4), st.integers(1, 4)),
    q=st.integers(1, 5),
    p=st.integers(1, 5),
    by_positions=st.booleans(),
    small=st.booleans(),
)
def test_products(
    kinds: tuple[str, str],
    rows: tuple[int, int],
    positions: tuple[int, int],
    q: int,
    p: int,
    by_positions: bool,
    small: bool,
) -> None:
    a, b = (piece(kind, n, t, q, p) for kind, n, t in zip(kinds, rows, positions, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pieces, "_by_positions", lambda *_: by_positions)
        patch.setattr(_pieces, "_NUMBERS", 7 if small else 2**20)
        total = torch.ones(a.rows, b.rows).double()
        add_products(total, a, b, {})
    expected = 1 + torch.einsum("iqp,jqp->ij", written(a), written(b))
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.dense(), written(a), rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.sampled_from([*combinations_with_replacement(KINDS, 2), ("one hot", "outer")]),
    rows=st.integers(1, 4),
    positions=st.tuples(st.integers(0, 6), st.integers(1, 6)),
    q=st.integers(1, 6),
    p=st.integers(1, 6),
    same=st.booleans(),
)
def test_row_products(
    kinds: tuple[str, str], rows: int, positions: tuple[int, int], q: int, p: int, same: bool
) -> None:
    a, b = (piece(kind, rows, t, q, p) for kind, t in zip(kinds, positions, strict=True))
    b = a if same else b
    total = torch.ones(rows).double()
    add_row_products(total, a, b)
    expected = 1 + (written(a) * written(b)).sum((1, 2))
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_two_sided_select_and_repeat(kind: str) -> None:
    one = piece(kind, 3, 4, 5, 6)
    left, right = torch.randn(2, 5).double(), torch.randn(3, 6).double()
    torch.testing.assert_close(one.two_sided(left, right), left @ written(one) @ right.T)
    torch.testing.assert_close(one.select(slice(1, 3)).dense(), written(one)[1:3])


def test_terms_of_several_calls_add_up() -> None:
    pieces = [piece(kind, 3, 2, 4, 5) for kind in (*KINDS, *KINDS)]
    together = joined(pieces)
    assert len(together) == 3
    expected = torch.stack([written(one) for one in pieces]).sum(0)
    torch.testing.assert_close(torch.stack([one.dense() for one in together]).sum(0), expected)


def test_positions_without_gradient_are_dropped() -> None:
    gradient, source = torch.randn(3, 5, 40), torch.randn(3, 5, 60)
    gradient[:, [1, 4]] = 0
    gradient[0, 2] = 0  # not for every row
    kept = outer(gradient, source, gradient, torch.Size((40, 60)))
    assert isinstance(kept, Outer)
    assert kept.positions == 3
    torch.testing.assert_close(kept.dense(), torch.einsum("itq,itp->iqp", gradient, source))


def test_what_is_smaller_written_out_is_written_out() -> None:
    gradient, source = torch.randn(3, 9, 4), torch.randn(3, 9, 6)
    kept = outer(gradient, source, gradient, torch.Size((4, 6)))
    assert isinstance(kept, Dense)
    torch.testing.assert_close(kept.dense(), torch.einsum("itq,itp->iqp", gradient, source))
