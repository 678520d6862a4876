"""Losses must be per example: what divides by the batch size, mixes examples or draws random numbers is refused by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._evaluate import evaluate
from gradreg.errors import CompatibilityError, CoupledExamplesError, ScalarError
from gradreg.model import call
from gradreg.scalars import ScalarFunction, bind
from gradreg.tracin._reader import Reader
from gradreg.tracin._tokens import per_token

__all__ = ["check_has_tokens", "check_per_example"]


def check_per_example(model: nn.Module, reader: Reader, of: ScalarFunction, heads: int | None) -> None:
    """Compare the scalar of rows read alone with that of the same rows in one batch.

    Args:
        model: In eval mode, with weights of a checkpoint.
        reader: The rows; the first, the middle and the last are looked at.
        of: The scalar.
        heads: The number of heads, or None.

    Raises:
        ScalarError: If the scalar is divided by the number of rows in the batch.
        CoupledExamplesError: If the value depends on the other rows, or on padding, in another way.
        CompatibilityError: If random numbers are drawn in eval mode.
    """
    last = len(reader) - 1
    positions = sorted({0, last // 2, last})
    positions = positions if len(positions) > 1 else positions * 2
    of = bind(of, model)
    before = torch.get_rng_state()
    together = _totals(model, reader.batch(positions), of, heads)
    if not torch.equal(before, torch.get_rng_state()):
        raise CompatibilityError(
            f"{type(model).__name__} or of={of!r} draws random numbers in eval mode, so every call would give other scores. "
            "Dropout as a function needs training=self.training."
        )
    alone = torch.cat([_totals(model, reader.batch([position]), of, heads) for position in positions])
    if _same(together, alone):
        return
    if _same(together * len(positions), alone):
        raise ScalarError(
            f"of={of!r} is divided by the number of rows in the batch (for {len(positions)} rows it is a {len(positions)}th of "
            "what it is for one), so scores would depend on batch sizes. Sum over an example's own axes and leave the batch "
            'alone: gr.loss(fn), or reduction="none".'
        )
    worst = int((together - alone).abs().argmax())
    raise CoupledExamplesError(
        f"of={of!r} of {reader.name(positions[worst])} is {float(alone[worst]):.6g} alone and {float(together[worst]):.6g} "
        "beside other rows: the model or the scalar mixes examples (a mean over the batch?), or sees padding (is an "
        "attention_mask missing?). Scores would depend on how the batch is split."
    )


def check_has_tokens(model: nn.Module, reader: Reader, of: ScalarFunction, heads: int | None) -> None:
    """Refuse scalars that cannot be split into tokens.

    Raises:
        ScalarError: If there is one value per example only.
    """
    of = bind(per_token(of), model)
    batch = reader.batch([0])
    with torch.no_grad():
        values = evaluate(of, call(model, batch), batch, heads)
    if values.dim() < (2 if heads is None else 3):
        raise ScalarError(
            f'of={of!r} gives one value per example, {tuple(values.shape)}; per="token" needs one per token, [n, tokens], as '
            "gr.loss(fn) of a language model gives."
        )


def _totals(model: nn.Module, batch: Batch, of: ScalarFunction, heads: int | None) -> Tensor:
    """Return the scalar of every row, summed over heads and targets, `[n]`."""
    with torch.no_grad():
        outputs = call(model, batch.map(torch.Tensor.clone))
        return evaluate(of, outputs, batch, heads).reshape(len(batch), -1).sum(1)


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether values agree but for rounding; models of HF round to float32 inside also when they are float64."""
    low = first.dtype in (torch.float16, torch.bfloat16)
    first, second = first.double(), second.double()
    tolerance = (5e-2 if low else 1e-3) * second.abs() + 1e-6 * second.abs().nan_to_num(nan=0.0).max()
    difference = (first - second).abs()
    return bool((difference <= tolerance).logical_or(difference.isnan()).all())
