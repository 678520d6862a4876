"""Projections: unbiased for every shape, the same everywhere, bounded in memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradreg.errors import GradregError
from gradreg.tracin import DenseProjection, TwoSidedProjection
from gradreg.tracin import _projection as module
from gradreg.tracin._signs import places, sign_matrix, stream_key, words

KINDS = [
    TwoSidedProjection(left=4, right=4),
    DenseProjection(size=16),
    DenseProjection(size=16, kind="sparse", nonzeros=2),
]
SHAPES = {"conv": (6, 3, 2, 2), "linear": (5, 7), "bias": (40,), "scale": (3,), "number": ()}


class Given:
    """Gradients of rows, as a projection reads them."""

    def __init__(self, gradients):
        self._gradients = gradients

    def __len__(self):
        return len(next(iter(self._gradients.values())))

    def gradient(self, name):
        return self._gradients[name]

    def two_sided(self, name, left, right):
        return torch.einsum("ab,nbc,dc->nad", left, self._gradients[name].flatten(2), right)


def rows_of(gradients):
    return Given(gradients)


def sample(shapes, rows, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(rows, *shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def kind_of(projection):
    return f"{type(projection).__name__}-{getattr(projection, 'kind', '')}"


@pytest.mark.parametrize("shape", [(32, 32), (8, 128), (128, 8), (1024,), (16, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("projection", KINDS, ids=kind_of)
def test_unbiased_for_every_shape(projection, shape):
    """Row 25: the mean of <Pu, Pv> / <u, v> over seeds is 1 within its standard error."""
    u = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
    v = u + 0.3 * torch.randn(1, *shape, generator=torch.Generator().manual_seed(2))
    both, exact = rows_of({"w": torch.cat([u, v])}), float((u * v).sum())
    seeds = 2000 if shape in ((32, 32), (8, 128)) else 200
    ratios = []
    for seed in range(seeds):
        first, second = type(projection)(**{**vars(projection), "seed": seed}).bind({"w": shape})(both)
        ratios.append(float(first @ second) / exact)
    error = np.std(ratios) / math.sqrt(seeds)
    assert error < 0.05
    assert abs(np.mean(ratios) - 1) < 3.5 * error


@pytest.mark.parametrize("projection", KINDS, ids=kind_of)
def test_one_matrix_for_any_batch_size(projection):
    given = sample(SHAPES, 9)
    bound = projection.bind(SHAPES, dtype=torch.float64)
    whole = bound(rows_of(given))
    assert whole.shape == (9, bound.size)
    for size in (1, 4):
        parts = [bound(rows_of({n: v[i : i + size] for n, v in given.items()})) for i in range(0, 9, size)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("projection", KINDS, ids=kind_of)
def test_equal_to_the_matrix_written_out(projection):
    """Linear, and its matrix, found by projecting unit vectors, has columns of the right length."""
    bound = projection.bind(SHAPES, dtype=torch.float64)
    numel = sum(math.prod(shape) for shape in SHAPES.values())
    unit, units, start = torch.eye(numel, dtype=torch.float64), {}, 0
    for name, shape in SHAPES.items():
        units[name] = unit[:, start : start + math.prod(shape)].reshape(numel, *shape)
        start += math.prod(shape)
    matrix = bound(rows_of(units))
    given = sample(SHAPES, 4)
    flat = torch.cat([value.reshape(4, -1) for value in given.values()], 1)
    torch.testing.assert_close(bound(rows_of(given)), flat @ matrix)
    torch.testing.assert_close(matrix.square().sum(1), torch.ones(numel, dtype=torch.float64))


def test_what_is_small_is_kept_whole():
    bound = TwoSidedProjection(left=8, right=8).bind({"small": (8, 8), "narrow": (4, 500)}, dtype=torch.float64)
    given = sample({"small": (8, 8), "narrow": (4, 500)}, 3)
    projected = bound(rows_of(given))
    assert bound.size == 64 + 4 * 8
    assert torch.equal(projected[:, :64], given["small"].flatten(1))


def test_blocks_do_not_change_the_numbers(monkeypatch):
    given = rows_of(sample({"w": (50, 30)}, 3))
    for projection in KINDS[1:]:
        whole = projection.bind({"w": (50, 30)}, dtype=torch.float64)(given)
        with monkeypatch.context() as patched:
            patched.setattr(module, "_BLOCK_NUMBERS", 64)
            blocked = projection.bind({"w": (50, 30)}, dtype=torch.float64)(given)
        torch.testing.assert_close(blocked, whole, rtol=1e-12, atol=1e-12)


def test_seeds_and_streams_differ():
    given = rows_of(sample({"w": (50, 30), "v": (50, 30)}, 2))
    for projection in KINDS:
        other = type(projection)(**{**vars(projection), "seed": 1})
        first = projection.bind({"w": (50, 30)}, dtype=torch.float64)(given)
        assert not torch.allclose(first, other.bind({"w": (50, 30)}, dtype=torch.float64)(given))
        assert not torch.allclose(first, projection.bind({"w": (50, 30)}, stream=1, dtype=torch.float64)(given))
        same = rows_of({"w": given.gradient("w"), "v": given.gradient("w")})  # a layer has signs of its own
        other_layer = projection.bind({"v": (50, 30)}, dtype=torch.float64)(same)
        assert not torch.allclose(first, other_layer)


def test_the_numbers_are_frozen():
    """The same on every machine and in every version: an index of last year must stay readable."""
    assert stream_key(0, 1, "layer.weight", "left") == 0x293014054C41F3F1
    assert [int(word) for word in words(0, 0, 3)] == [
        16294208416658607535,  # SplitMix64 of seed 0, as published
        7960286522194355700,
        487617019471545679,
    ]
    assert sign_matrix(7, 3, 5, 6).tolist() == [[1, 1, -1, 1, -1, -1], [-1, 1, -1, 1, 1, -1]]
    where, signs = places(7, 0, 3, 10, 2)
    assert where.tolist() == [[1, 5], [4, 7], [2, 6]]
    assert signs.tolist() == [[1, -1], [-1, 1], [-1, 1]]


def test_any_part_of_the_stream_alone():
    assert torch.equal(sign_matrix(9, 0, 40, 70)[13:29], sign_matrix(9, 13, 29, 70))
    where, signs = places(9, 0, 40, 30, 4)
    part_where, part_signs = places(9, 13, 29, 30, 4)
    assert torch.equal(where[13:29], part_where)
    assert torch.equal(signs[13:29], part_signs)
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 30 for row in where.tolist())
    assert abs(float(sign_matrix(1, 0, 4000, 64).mean())) < 0.01


@pytest.mark.parametrize("projection", KINDS, ids=kind_of)
def test_the_global_generators_are_left_alone(projection):
    """Row 15: a draw after seeding is the same with a construction in between."""
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(3), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    projection.bind(SHAPES)(rows_of(sample(SHAPES, 2, torch.float32)))
    assert torch.equal(torch.rand(3), expected[0])
    assert np.random.rand() == expected[1]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: TwoSidedProjection(left=0), "left=0"),
        (lambda: DenseProjection(size=2.5), "size=2.5"),
        (lambda: DenseProjection(kind="gauss"), "allowed are 'rademacher' and 'sparse'"),
        (lambda: DenseProjection(size=2, kind="sparse"), "nonzeros=4 is more than size=2"),
    ],
)
def test_wrong_sizes(make, expected):
    with pytest.raises(GradregError, match=expected):
        make()


def test_memory_is_that_of_a_block(monkeypatch):
    """A whole matrix of 300,000 x 512 signs would take 586 MiB; no block has more than 16."""
    sizes = []

    def watched(*arguments):
        block = sign_matrix(*arguments)
        sizes.append(block.numel() * block.element_size())
        return block

    monkeypatch.setattr(module, "sign_matrix", watched)
    rows = rows_of({"w": torch.ones(1, 1000, 300)})
    projected = DenseProjection(size=512).bind({"w": (1000, 300)})(rows)
    assert projected.shape == (1, 512)
    assert sum(sizes) == 300_000 * 512 * 4
    assert max(sizes) <= 2**24
