"""Gradients of heads at their shared features as products of two factors, which penalties need not multiply out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._session import current_session
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Wrt


def head_factors(
    model: nn.Module,
    batch: Batch,
    of: ScalarFunction,
    wrt: Wrt | tuple[Wrt, ...],
    worthwhile: Callable[[int, Sequence[int], int], bool],
) -> list[tuple[Tensor, Tensor]] | None:
    r"""Return $(\delta_k, W_k)$ for every head, with $\delta_k W_k$ its gradients at the features, or None where there are none.

    They come from the shared forward of a step, for few heads that begin with a linear layer: $\delta$ `[n, h]` is the gradient
    at its output, W `[h, d]` its weight.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: As in `gradients`.
        wrt: As in `gradients`.
        worthwhile: From n, the widths h of all heads and the number d of features to whether factors are wanted.

    Returns:
        The factors, with graph.
    """
    session = current_session()
    if session is None or not session.might_serve(model, batch, "example", None, True, "auto"):
        return None
    return session.serve_factors(of, wrt, batch, worthwhile)
