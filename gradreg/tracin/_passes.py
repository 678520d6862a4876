"""Passes over data with one checkpoint in the model: the gradients of rows, in the form their products need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import Coverage, Factors, collect_factors, gradients
from gradreg.engine._points import resolve_params
from gradreg.engine._request import head_count
from gradreg.errors import AttributionWarning, warn
from gradreg.scalars import ScalarFunction
from gradreg.tracin._borrow import borrowed
from gradreg.tracin._optimizer_step import OptimizerStep
from gradreg.tracin._projection import BoundProjection
from gradreg.tracin._reader import Reader
from gradreg.tracin._safety import check_per_example
from gradreg.tracin._spec import Spec
from gradreg.tracin.checkpoints import Checkpoint, LoadedCheckpoint, load_weights

__all__ = ["Passes", "opened"]


class Passes:
    """A borrowed model and what is asked of it; made by `opened`."""

    def __init__(self, spec: Spec, model: nn.Module) -> None:
        self.model = model
        self.heads = head_count(model)
        self.params = resolve_params(model, spec.wrt)
        first = next(iter(self.params.values()))
        self.device = first.device
        self.dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.coverage: tuple[Coverage, ...] = ()
        self.spec = spec
        self._step: OptimizerStep | None = None
        self._projection: BoundProjection | None = None
        self._fingerprints: dict[int, str] = {}
        self._checked: set[tuple[str, int]] = set()

    def load(self, position: int) -> tuple[Checkpoint, LoadedCheckpoint]:
        """Put the weights of a checkpoint, by its position among those of the TracIn, into the borrowed model.

        Raises:
            CheckpointError: If they do not fit.
        """
        checkpoint = self.spec.checkpoints[position]
        loaded = checkpoint.load()
        load_weights(self.model, loaded.weights, checkpoint.name)
        self._notice_twins(position, loaded.fingerprint)
        everything = dict(self.model.named_parameters())
        self._step = None
        if self.spec.update == "optimizer":
            self._step = OptimizerStep(
                checkpoint.optimizer_state(),
                everything,
                list(self.params),
                checkpoint.optimizer_parameters,
                checkpoint.name,
            )
        self._projection = None
        if self.spec.projection is not None:
            self._projection = self.spec.projection.bind(
                {name: tuple(parameter.shape) for name, parameter in self.params.items()},
                stream=loaded.fingerprint,
                dtype=self.dtype,
                device=self.device,
            )
        return checkpoint, loaded

    def _notice_twins(self, position: int, fingerprint: str) -> None:
        if position in self._fingerprints:
            return
        for other, known in self._fingerprints.items():
            if known == fingerprint:
                first, second = self.spec.checkpoints[other], self.spec.checkpoints[position]
                warn(
                    f"Checkpoints {other} and {position}, {first!r} and {second!r}, hold the same weights; they count twice. "
                    "Was a state dict saved that training went on to change, or one file copied?",
                    AttributionWarning,
                )
                break
        self._fingerprints[position] = fingerprint

    def check(self, reader: Reader, of: ScalarFunction) -> None:
        """Refuse scalars that are not per example, once for each side."""
        if (reader.side, id(of)) not in self._checked:
            check_per_example(self.model, reader, of, self.heads, self._squared_norms)
            self._checked.add((reader.side, id(of)))

    def _squared_norms(self, batch: Batch, of: ScalarFunction) -> Tensor:
        return collect_factors(self.model, batch, of, self.spec.wrt).squared_norms()

    def rows(self, batch: Batch, of: ScalarFunction, *, each_target: bool = False, step: bool = False) -> Factors:
        """Return the gradients of the rows of a batch: factors, or what was made of them.

        Args:
            batch: The rows.
            of: The scalar.
            each_target: Rows are (example, target).
            step: Return optimizer steps, where the TracIn asks for them.
        """
        found = collect_factors(self.model, batch, of, self.spec.wrt, each_target=each_target)
        self.coverage = found.coverage
        if step and self._step is not None:
            found = self._step(found)
        if self._projection is not None:
            found = Factors.written_out({"projected": self._projection(found)})
        return found

    def step_products(self, rows: Factors) -> dict[str, Tensor]:
        """Return the inner products of gradients with the optimizer steps they would cause, per parameter, `[rows]` each."""
        assert self._step is not None
        return rows.row_dots_by_parameter(self._step(rows))

    def total(self, batch: Batch, of: ScalarFunction) -> Factors:
        """Return the sum of the gradients of a batch, as one row."""
        found = gradients(self.model, batch, of, self.spec.wrt, per="batch")
        sums: dict[str, Tensor] = {}
        for name, parameter in self.params.items():
            value = found[name].to(self.dtype)
            sums[name] = value.reshape(-1, *parameter.shape).sum(0, keepdim=True)
        whole = Factors.written_out(sums)
        return whole if self._projection is None else Factors.written_out({"projected": self._projection(whole)})


@contextmanager
def opened(spec: Spec) -> Iterator[Passes]:
    """Borrow the model for a number of passes.

    Args:
        spec: What is computed.

    Yields:
        The passes.
    """
    with borrowed(spec.model) as model:
        yield Passes(spec, model)
