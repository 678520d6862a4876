"""Gram matrices of token gradients, one per group of parameters; the gradients themselves are dropped on the way."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradreg.attribution.similarity._example import Example
from gradreg.attribution.similarity._groups import Place
from gradreg.attribution.similarity._rows import Cell
from gradreg.attribution.similarity._scalar import WEIGHTS, Weighted, one_hot_rows
from gradreg.batch import Batch
from gradreg.engine import Factors, collect_factors
from gradreg.errors import DisconnectedWarning, SlowRouteWarning
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Params

# The engine looks at three rows before it takes a model apart, with their gradients written out. What it learns serves all
# chunks of at least as many rows.
_LOOKED_AT = 3

_PASSING = 4  # a pass holds about this many times the bytes of its factors and logits


@dataclass(frozen=True)
class Side:
    """Rows of gradients to take: an example with weights of its targets, each a row.

    Attributes:
        batch: Of the examples.
        example: Which one, per row.
        weights: Of its targets, `[rows, targets]`.
        of: The scalar, one value per target.
        outputs: Bytes of the model's outputs per row.
    """

    batch: Batch
    example: tuple[int, ...]
    weights: Tensor
    of: ScalarFunction
    outputs: int = 0

    @property
    def positions(self) -> int:
        """About how many positions a layer sees per row."""
        lengths = [tensor.shape[1] for tensor in self.batch.tensors() if tensor.dim() == 2]
        return max([1, *lengths])

    def rows(self, chosen: list[int]) -> Batch:
        """Return some rows as a batch."""
        repeated = self.batch[[self.example[row] for row in chosen]]
        weights = self.weights[chosen].to(next(iter(repeated.tensors())).device)
        return repeated.with_extras(**{WEIGHTS: weights})


def token_side(example: Example) -> Side:
    """Return a row per target that counts."""
    weights = one_hot_rows(list(example.positions), example.values.numel())
    return Side(example.batch, (0,) * len(example.positions), weights, example.of, example.output_bytes)


@dataclass
class Grams:
    """All inner products.

    Attributes:
        cells: By group and kind, the Gram matrix of the first rows.
        total: Of all rows and parameters, `[rows, rows]`.
        routes: From parameter to the rule that gave its gradients.
    """

    cells: tuple[Cell, ...]
    total: Tensor
    routes: dict[str, str]


def gram_matrices(
    model: nn.Module,
    sides: Sequence[Side],
    inner: int,
    parameters: Mapping[str, nn.Parameter],
    placed: Mapping[str, Place],
    memory: int,
) -> Grams:
    """Take the gradients of all rows of all sides, in blocks of parameters and rows that fit into memory.

    Args:
        model: In eval mode.
        sides: Whose rows, one after the other.
        inner: How many rows at the start, of whole sides, get Gram matrices per cell.
        parameters: With respect to which, by first name.
        placed: From parameter to its group and kind.
        memory: About how many bytes to hold.
    """
    rows = sum(len(side.example) for side in sides)
    total = torch.zeros(rows, rows, dtype=torch.float64)
    own = {key: torch.zeros(inner, inner, dtype=torch.float64) for key in dict.fromkeys(placed.values())}
    routes: dict[str, str] = {}
    for block in _blocks(sides, parameters, memory):
        pieces = list(_pieces(model, sides, block, parameters, memory // 2))
        for k, (start, factors) in enumerate(pieces):
            for other_start, others in pieces[k:]:
                at, beside = slice(start, start + len(factors)), slice(other_start, other_start + len(others))
                for name, part in factors.dot_by_parameter(others).items():
                    found = part.cpu().double()
                    targets = [total, *([own[placed[name]]] if beside.stop <= inner else [])]
                    for target in targets:
                        target[at, beside] += found
        routes.update({row.name: row.rule for row in pieces[0][1].coverage if row.name in block and row.rule})
    for matrix in (total, *own.values()):
        matrix.copy_(torch.triu(matrix) + torch.triu(matrix, 1).T)
    return Grams(tuple(_cell(place, gram, parameters, placed) for place, gram in own.items()), total, routes)


def _cell(place: Place, gram: Tensor, parameters: Mapping[str, nn.Parameter], placed: Mapping[str, Place]) -> Cell:
    names = tuple(name for name in parameters if placed[name] == place)
    return Cell(place.group, place.kind, names, sum(parameters[name].numel() for name in names), gram)


def _pieces(
    model: nn.Module,
    sides: Sequence[Side],
    block: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    memory: int,
) -> Iterator[tuple[int, Factors]]:
    """Yield factors of chunks of rows with the number of their first row."""
    start = 0
    for side in sides:
        row = side.outputs + sum(_bytes(parameters[name], side.positions) for name in block)
        chunk = max(1, memory // (_PASSING * row))
        for first in range(0, len(side.example), chunk):
            rows = list(range(len(side.example)))[first : first + chunk]
            batch = side.rows([rows[k % len(rows)] for k in range(max(len(rows), _LOOKED_AT))])
            with warnings.catch_warnings():
                # both are said by the report: routes, and a gradient of zero
                warnings.simplefilter("ignore", SlowRouteWarning)
                warnings.simplefilter("ignore", DisconnectedWarning)
                factors = collect_factors(model, batch, Weighted(side.of), tuple(Params(name) for name in block))
            yield start + first, factors.select(slice(0, len(rows))) if len(rows) < _LOOKED_AT else factors
        start += len(side.example)


def _blocks(sides: Sequence[Side], parameters: Mapping[str, nn.Parameter], memory: int) -> Iterator[list[str]]:
    """Cut the parameters into blocks whose factors, of all rows, fit into memory; a block has at least one parameter."""
    block: list[str] = []
    held = written = 0
    for name, parameter in parameters.items():
        size = sum(len(side.example) * _bytes(parameter, side.positions) for side in sides)
        three = _LOOKED_AT * parameter.numel() * parameter.element_size()
        if block and (held + size > memory // 2 or written + three > memory):
            yield block
            block, held, written = [], 0, 0
        block.append(name)
        held, written = held + size, written + three
    if block:
        yield block


def _bytes(parameter: Tensor, positions: int) -> int:
    """Return about how many bytes one row's gradient takes: written out, or as outer products of a layer's positions."""
    numel = parameter.numel()
    if parameter.dim() == 2:
        numel = min(numel, positions * sum(parameter.shape))
    return max(numel * max(parameter.element_size(), 4), 1)
