"""Scalars that contract all outputs of an example: sums, and products with given vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from gradreg.batch import Batch
from gradreg.errors import ScalarError
from gradreg.scalars._outputs import read_outputs


@dataclass(frozen=True)
class Total:
    """See `total` and `total_log_probability`."""

    output: str | int | None = None
    log_probability: bool = False

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]`."""
        values = read_outputs(outputs, self.output)
        if self.log_probability:
            if values.dim() < 2 or values.shape[-1] < 2:
                raise ScalarError(
                    f"total_log_probability() needs at least two classes; the outputs are {tuple(values.shape)}."
                )
            values = F.log_softmax(values, -1)
        return values.flatten(1).sum(1) if values.dim() > 1 else values


@dataclass(frozen=True)
class Projected:
    """See `projected`."""

    reads_extras: ClassVar[bool] = True

    name: str
    output: str | int | None = None

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]` or `[n, P]`."""
        values = read_outputs(outputs, self.output)
        given = batch.extra(
            self.name, "the vectors that outputs are contracted with, [n, *outputs] or [n, P, *outputs]"
        )
        if given.shape == values.shape:
            return (values * given).flatten(1).sum(1) if values.dim() > 1 else values * given
        if given.dim() != values.dim() + 1 or given.shape[2:] != values.shape[1:] or given.shape[0] != values.shape[0]:
            raise ScalarError(
                f"batch.extras[{self.name!r}] has shape {tuple(given.shape)}; the outputs are {tuple(values.shape)}, so "
                f"({values.shape[0]}, P, *{tuple(values.shape[1:])}) is needed, or the shape of the outputs."
            )
        return (values.unsqueeze(1) * given).flatten(2).sum(2) if values.dim() > 1 else values.unsqueeze(1) * given


def total(*, output: str | int | None = None) -> Total:
    r"""The sum of an example's outputs, $\sum_c z_c$: the score of a critic, whether it is `[n]`, `[n, 1]` or `[n, 1, h, w]`.

    Args:
        output: Which output to read.

    Raises:
        ScalarError: When called, if the outputs are no tensor and nothing was named.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.scalars.total()(torch.tensor([[1.0, 3.0]]), gr.Batch(torch.zeros(1, 1)))
        tensor([4.])
    """
    return Total(output=output)


def total_log_probability(*, output: str | int | None = None) -> Total:
    r"""The sum of the log-probabilities of all classes, $\sum_c \log p_c$, in nats.

    Args:
        output: Which output to read.

    Raises:
        ScalarError: When called, if there are fewer than two classes.

    References:
        Ross, Hughes, Doshi-Velez 2017, arXiv 1703.03717, equation 1.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.scalars.total_log_probability()(torch.zeros(1, 2), gr.Batch(torch.zeros(1, 1)))
        tensor([-1.3863])
    """
    return Total(output=output, log_probability=True)


def projected(name: str, *, output: str | int | None = None) -> Projected:
    r"""The outputs contracted with vectors of the batch, $v_i \cdot f(x_i)$: its gradient is $J_i^\top v_i$.

    Args:
        name: Where the vectors are in `batch.extras`: `[n, *outputs]`, or `[n, P, *outputs]` for P targets per example.
        output: Which output to read.

    Raises:
        BatchError: When called, if the batch has no such extra.
        ScalarError: When called, if its shape does not fit.

    Example:
        >>> import torch, gradreg as gr
        >>> batch = gr.Batch(torch.zeros(1, 3), extras={"v": torch.tensor([[1.0, -1.0]])})
        >>> gr.scalars.projected("v")(torch.tensor([[1.0, 3.0]]), batch)
        tensor([-2.])
    """
    return Projected(name, output=output)
