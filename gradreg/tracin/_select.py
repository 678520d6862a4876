"""Which parameters take part."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gradreg.engine._points import resolve_params
from gradreg.errors import GradregError
from gradreg.wrt import Params

__all__ = ["selected_parameters"]


def selected_parameters(
    model: nn.Module, params: str | Sequence[str] | Params | Sequence[Params]
) -> tuple[tuple[Params, ...], tuple[str, ...]]:
    """Return globs as `Params`, and the names of the trainable parameters that they match.

    Raises:
        GradregError: If something else than globs is found.
    """
    items: list[object] = [params] if isinstance(params, (str, Params)) else list(params)
    wrt = tuple(item if isinstance(item, Params) else Params(item) for item in items if isinstance(item, (str, Params)))
    if not wrt or len(wrt) < len(items):
        raise GradregError(
            f"params={params!r}; allowed are globs of parameter names, one or a list, such as '*' or 'head.**'."
        )
    return wrt, tuple(resolve_params(model, wrt))
