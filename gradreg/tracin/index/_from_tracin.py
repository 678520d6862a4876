"""Training gradients of a TracIn, as an index is built from them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradreg.engine import Factors
from gradreg.model import unwrap
from gradreg.tracin._memory import Budget
from gradreg.tracin._passes import Passes
from gradreg.tracin._reader import Reader
from gradreg.tracin.index._describe import describe
from gradreg.tracin.index._source import RowReader

_LARGEST_BATCH = 256  # rows of an index are computed in batches that a resumed run must repeat, so they stay small


class TracInSource:
    """Gradients of training examples at the checkpoints of a TracIn, projected if it projects.

    Args:
        passes: On its borrowed model.
        trains: Training examples.
        memory: Bytes to hold at a time.
        chunk_size: Examples at a time, or None.
    """

    def __init__(self, passes: Passes, trains: Reader, memory: int, chunk_size: int | None) -> None:
        self._spec, self._passes, self._trains, self._memory = passes.spec, passes, trains, memory
        self.rows, self.checkpoints = len(trains), len(self._spec.checkpoints)
        self.size = vector_size(passes)
        self.dtype = "float64" if passes.dtype == torch.float64 else "float32"
        self._batch_rows: int | None = chunk_size

    @property
    def batch_rows(self) -> int:
        """Examples per forward and backward: what the budget of memory allows, seen from a few rows."""
        if self._batch_rows is None:
            budget = Budget(self._memory)
            with self.at(0):
                batch = self._trains.batch(range(min(4, self.rows)))
                rows = self._passes.rows(batch, self._spec.of, step=True)
                per_row = max(rows.nbytes // len(batch), self.size * self._passes.dtype.itemsize)
                budget.observe("train", per_row * len(batch), len(batch))
            self._batch_rows = max(1, min(budget.chunk("train"), _LARGEST_BATCH))
        return self._batch_rows

    def fixed_layout(self) -> dict[str, Any]:
        """Return the parts of a layout that nobody chooses."""
        return {"rows": self.rows, "checkpoints": self.checkpoints, "size": self.size, "dtype": self.dtype}

    def identity(self) -> dict[str, Any]:
        """Return fingerprints of all that decides the numbers."""
        spec = self._spec
        return {
            "model": describe_model(self._passes.model),
            "checkpoints": [
                {"weights": checkpoint.load().fingerprint, "learning_rate": checkpoint.learning_rate}
                for checkpoint in spec.checkpoints
            ],
            "data": {"rows": self.rows, "fingerprint": self._trains.rows.fingerprint()},
            "spec": {
                "of": describe(spec.of),
                "params": sorted(self._passes.params),
                "normalize": spec.normalize,
                "update": spec.update,
            },
            "projection": None if spec.projection is None else spec.projection.describe(),
        }

    @contextmanager
    def at(self, checkpoint: int) -> Iterator[RowReader]:
        """Load a checkpoint for the duration of a context."""
        spec, passes, trains = self._spec, self._passes, self._trains
        passes.load(checkpoint)
        passes.check(trains, spec.of)

        def read(start: int, stop: int) -> tuple[Tensor, Tensor]:
            vectors = as_vectors(passes.rows(trains.batch(range(start, stop)), spec.of, step=True))
            squares = vectors.double().square().sum(1)
            if not bool(torch.isfinite(squares).all()):
                trains.refuse_broken([start + place for place in (~torch.isfinite(squares)).nonzero()[:, 0].tolist()])
            return vectors.cpu(), squares.cpu()

        yield read


def vector_size(passes: Passes) -> int:
    """Return how many numbers stand for one example at one checkpoint."""
    shapes = {name: tuple(parameter.shape) for name, parameter in passes.params.items()}
    projection = passes.spec.projection
    return sum(math.prod(shape) for shape in shapes.values()) if projection is None else projection.bind(shapes).size


def as_vectors(rows: Factors) -> Tensor:
    """Return the gradients of rows as one matrix, `[rows, size]`, parameters in their order."""
    parts = [rows.gradient(name).reshape(len(rows), -1) for name in rows.names]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def describe_model(model: torch.nn.Module) -> dict[str, Any]:
    """Return class, structure and shapes; the weights are those of the checkpoints."""
    inner = unwrap(model)
    shapes = {name: [str(p.dtype), *p.shape] for name, p in inner.named_parameters()}
    return {
        "class": type(inner).__qualname__,
        "parameters": sum(p.numel() for p in inner.parameters()),
        "structure": hashlib.sha256(repr(inner).encode()).hexdigest()[:16],
        "shapes": hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16],
    }
