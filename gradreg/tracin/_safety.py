"""Losses must be per example: what divides by the batch size, mixes examples or draws random numbers is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._evaluate import evaluate
from gradreg.errors import CompatibilityError, CoupledExamplesError, ScalarError
from gradreg.model import call, devices_of
from gradreg.scalars import ScalarFunction, bind
from gradreg.tracin._reader import Reader
from gradreg.tracin._tokens import per_token

__all__ = ["check_has_tokens", "check_per_example"]

# By dtype: how far values may differ, relatively, then squared norms of gradients, and values absolutely
_TOLERANCES = {
    torch.float64: (2e-5, 1e-4, 1e-9),
    torch.float32: (1e-3, 1e-2, 1e-5),
    torch.float16: (5e-2, 5e-1, 1e-1),
    torch.bfloat16: (5e-2, 5e-1, 1e-1),
}
_FITTED = 1e-3  # a loss below this says little about its gradient


def check_per_example(
    model: nn.Module,
    reader: Reader,
    of: ScalarFunction,
    heads: int | None,
    norms: Callable[[Batch, ScalarFunction], Tensor],
) -> None:
    """Compare the scalar of rows read alone with that of the same rows in one batch; where rows are padded, gradients too.

    Args:
        model: In eval mode, with weights of a checkpoint.
        reader: The rows; the first, the middle and the last are looked at.
        of: The scalar.
        heads: The number of heads, or None.
        norms: From a batch to the squared norms of its gradients, `[n]`.

    Raises:
        ScalarError: If the scalar is divided by the number of rows in the batch.
        CoupledExamplesError: If the value depends on the other rows, or on padding, in another way.
        CompatibilityError: If random numbers are drawn in eval mode.
    """
    last = len(reader) - 1
    positions = sorted({0, last // 2, last})
    positions = positions if len(positions) > 1 else positions * 2
    batch, single = reader.batch(positions), [reader.batch([position]) for position in positions]
    bound = bind(of, model)
    before = _random_states(model)
    together = _totals(model, batch, bound, heads)
    if any(not torch.equal(old, new) for old, new in zip(before, _random_states(model), strict=True)):
        raise CompatibilityError(
            f"{type(model).__name__} or of={of!r} draws random numbers in eval mode, so every call would give other scores. "
            "Dropout as a function needs training=self.training."
        )
    alone = torch.cat([_totals(model, one, bound, heads) for one in single])
    if not _same(together, alone) and _same(together * len(positions), alone):
        raise ScalarError(
            f"of={of!r} is divided by the number of rows in the batch (for {len(positions)} rows it is a {len(positions)}th of "
            "what it is for one), so scores would depend on batch sizes. Sum over an example's own axes and leave the batch "
            'alone: gr.loss(fn), or reduction="none".'
        )
    if not _same(together, alone):
        raise _mixed(f"of={of!r}", reader, positions, together, alone)
    if all(_shapes(one) == _shapes(batch) for one in single):
        return
    # rows are padded, and what padding does to a loss may be too small to be seen
    seen, dtype = alone.abs() > _FITTED, alone.dtype
    together, alone = norms(batch, of), torch.cat([norms(one, of) for one in single])
    if not _same(together, alone, seen, dtype):
        raise _mixed(f"The squared norm of the gradient of of={of!r}", reader, positions, together, alone)


def _mixed(what: str, reader: Reader, positions: list[int], together: Tensor, alone: Tensor) -> CoupledExamplesError:
    worst = int((together - alone).abs().argmax())
    return CoupledExamplesError(
        f"{what} for {reader.name(positions[worst])} is {float(alone[worst]):.8g} alone and {float(together[worst]):.8g} beside "
        "other rows: the model or the scalar mixes examples (a mean over the batch?), or sees padding (is an attention_mask "
        "missing?). Scores would depend on how the batch is split."
    )


def _random_states(model: nn.Module) -> list[Tensor]:
    cuda = {device for device in devices_of(model) if device.type == "cuda"}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in sorted(cuda, key=str))]


def _shapes(batch: Batch) -> list[torch.Size]:
    return [tensor.shape[1:] for tensor in batch.tensors()]


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


def _same(first: Tensor, second: Tensor, seen: Tensor | None = None, dtype: torch.dtype | None = None) -> bool:
    """Whether values, or squared norms where `seen`, agree but for rounding.

    Kernels round differently for other batch sizes, models of HF round to float32 inside also when they are float64, and the
    gradient of an example that is fitted to the last digit is rounding alone.
    """
    values, gradients, least = _TOLERANCES[dtype or first.dtype]
    first, second = first.double(), second.double()
    relative, floor = (values, least) if seen is None else (gradients, 0.0)
    tolerance = relative * second.abs() + 1e-6 * second.abs().nan_to_num(nan=0.0).max() + floor
    difference = (first - second).abs()
    fine = (difference <= tolerance).logical_or(difference.isnan())
    return bool((fine if seen is None else fine.logical_or(~seen)).all())
