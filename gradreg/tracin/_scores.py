"""The computation: checkpoints outermost, test gradients kept, training examples streamed past them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from gradreg.errors import NonFiniteLossError
from gradreg.tracin._layers import by_layer
from gradreg.tracin._memory import Budget
from gradreg.tracin._passes import Passes
from gradreg.tracin._query import Query
from gradreg.tracin._reader import Reader
from gradreg.tracin._safety import check_has_tokens
from gradreg.tracin._sides import Side, View, aggregated, broken_rows, kept, streamed
from gradreg.tracin._sink import Sink
from gradreg.tracin._spec import Spec

__all__ = ["TOTAL", "pair_scores", "self_scores"]

TOTAL = ""  # the key of scores that are not split by layer


def pair_scores(
    spec: Spec,
    passes: Passes,
    trains: Reader,
    tests: Reader,
    positions: Sequence[int],
    query: Query,
    budget: Budget,
) -> Sink:
    """Return the scores of some tests against all training examples, summed over checkpoints.

    Args:
        spec: The checkpoints, scalars and normalization.
        passes: On the borrowed model.
        trains: Training examples.
        tests: Test examples.
        positions: Which tests.
        query: What is asked.
        budget: Of memory.

    Returns:
        The parts of the scores.
    """
    cosine, relatif = spec.normalize == "cosine", spec.normalize == "relatif"
    train_view = View(spec.of, query.splits("train"), step=True, norms=cosine or relatif)
    test_view = View(spec.test_of, query.splits("test"), norms=cosine)
    sink = Sink(1 if query.aggregate else len(positions), len(trains), passes.dtype)
    own = torch.zeros(len(trains), dtype=passes.dtype)  # self-influence
    with progress(spec, len(trains)) as bar:
        for number in range(len(spec.checkpoints)):
            rate = passes.load(number)[0].learning_rate
            _check(passes, trains, tests, spec, query)
            if query.aggregate:
                groups = iter([[aggregated(passes, tests, positions, test_view, budget)]])
            else:
                groups = kept(passes, tests, positions, test_view, budget)
            for turn, group in enumerate(groups):
                bar.total = max(bar.total, bar.n + len(trains) * (len(spec.checkpoints) - number))
                for train in streamed(passes, trains, range(len(trains)), train_view, budget):
                    for test in group:
                        _add(sink, query, rate, test, train, cosine, (tests, trains))
                    if relatif and turn == 0 and train.norms is not None:
                        own[train.where] += rate * train.norms.square().to(own)
                    bar.update(len(train.positions))
    if relatif:
        inverse = _inverse(own.sqrt())
        sink.scale(lambda part: part * inverse.view(1, -1, *[1] * (part.dim() - 2)))
    return sink


def self_scores(spec: Spec, passes: Passes, trains: Reader, per: str | None, budget: Budget) -> Sink:
    """Return the score of every example with itself, summed over checkpoints, `[1, trains]`, as a whole or per layer."""
    sink = Sink(1, len(trains), passes.dtype)
    with progress(spec, len(trains)) as bar:
        for number in range(len(spec.checkpoints)):
            rate = passes.load(number)[0].learning_rate
            passes.check(trains, spec.of)
            for side in streamed(passes, trains, range(len(trains)), View(spec.of), budget):
                if spec.update == "optimizer":
                    parts = passes.step_products(side.rows)
                elif per is None:
                    parts = {TOTAL: side.rows.squared_norms()}
                else:
                    parts = side.rows.squared_norms_by_parameter()
                for key, values in (
                    by_layer(parts) if per else {TOTAL: torch.stack(list(parts.values())).sum(0)}
                ).items():
                    if not bool(torch.isfinite(values).all()):
                        trains.refuse_broken(broken_rows(side))
                    sink.add(key, slice(0, 1), side.where, rate * values[None])
                bar.update(len(side.positions))
    return sink


def progress(spec: Spec, examples: int) -> Any:
    """Return a progress bar over training examples and checkpoints, shown on a terminal only."""
    hidden = None if spec.show_progress else True
    return tqdm(total=examples * len(spec.checkpoints), desc="TracIn", unit="example", disable=hidden)


def _check(passes: Passes, trains: Reader, tests: Reader, spec: Spec, query: Query) -> None:
    for reader, of in ((trains, spec.of), (tests, spec.test_of)):
        passes.check(reader, of)
        if query.splits(reader.side):
            check_has_tokens(passes.model, reader, of, passes.heads)


def _add(
    sink: Sink, query: Query, rate: float, test: Side, train: Side, cosine: bool, readers: tuple[Reader, Reader]
) -> None:
    layers = query.per == "layer"
    parts = by_layer(test.rows.dot_by_parameter(train.rows)) if layers else {TOTAL: test.rows.dot(train.rows)}
    for key, block in parts.items():
        if not bool(torch.isfinite(block).all()):
            _refuse(test, train, readers)
        if query.splits("train"):
            block = block.view(len(block), -1, train.tokens)
        elif query.splits("test"):
            block = block.view(-1, test.tokens, block.shape[1]).transpose(1, 2)
        if cosine:
            assert test.norms is not None
            assert train.norms is not None
            scale = _inverse(test.norms)[:, None] * _inverse(train.norms)[None]
            block = block * scale.view(*scale.shape, *[1] * (block.dim() - 2))
        sink.add(key, test.where, train.where, rate * block)


def _inverse(norms: Tensor) -> Tensor:
    """Return 1 / norm, and 0 for a gradient of zero, which is similar to nothing."""
    return torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))


def _refuse(test: Side, train: Side, readers: tuple[Reader, Reader]) -> None:
    for reader, side in zip(readers, (test, train), strict=True):
        reader.refuse_broken(broken_rows(side))
    raise NonFiniteLossError(
        f"A score between {readers[0].name(test.positions[0])} ff. and {readers[1].name(train.positions[0])} ff. overflows, "
        "though all gradients are finite. Convert the model to a wider type, or rescale the losses."
    )
