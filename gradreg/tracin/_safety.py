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
    what = "" if not _same(together, alone) else "The squared norm of the gradient of "
    if what and _shapes(batch) != _shapes(single[0]):  # what padding does to a loss may be too small to be seen
        together, alone = norms(batch, of), torch.cat([norms(one, of) for one in single])
    if not _same(together, alone):
        worst = int((together - alone).abs().argmax())
        raise CoupledExamplesError(
            f"{what or 'The value of '}of={of!r} for {reader.name(positions[worst])} is {float(alone[worst]):.8g} alone and "
            f"{float(together[worst]):.8g} beside other rows: the model or the scalar mixes examples (a mean over the batch?) or "
            "sees padding (is an attention_mask missing?). Scores would depend on how the batch is split."
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


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether values agree but for rounding.

    Models of HF round to float32 inside also when they are float64, and GPUs may round convolutions to TF32.
    """
    low = first.dtype in (torch.float16, torch.bfloat16)
    relative = 5e-2 if low else 1e-3 if first.device.type != "cpu" else 2e-5
    first, second = first.double(), second.double()
    tolerance = relative * second.abs() + 1e-6 * second.abs().nan_to_num(nan=0.0).max()
    difference = (first - second).abs()
    return bool((difference <= tolerance).logical_or(difference.isnan()).all())
