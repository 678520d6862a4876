"""All that decides the scores besides the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from gradreg.errors import GradregError, ScalarError
from gradreg.model import check_compatible, check_grad_possible
from gradreg.scalars import ScalarFunction, loss
from gradreg.tracin._borrow import plain_module
from gradreg.tracin._projection import Projection
from gradreg.tracin._select import selected_parameters
from gradreg.tracin.checkpoints import Checkpoint, as_checkpoints
from gradreg.wrt import Params

__all__ = ["Spec", "make_spec"]

_NORMALIZE = (False, "cosine", "relatif")


@dataclass(frozen=True)
class Spec:
    """What a `TracIn` was made of, checked; see there.

    Attributes:
        model: The model, without wrappers.
        of: The training loss.
        test_of: The test loss.
        checkpoints: In their order.
        wrt: Globs of parameters.
        selected: Names of the parameters that they match.
        normalize: False, `"cosine"` or `"relatif"`.
        update: `"gradient"` or `"optimizer"`.
        projection: A projection, or None.
        show_progress: Whether to show a progress bar.
    """

    model: nn.Module
    of: ScalarFunction
    test_of: ScalarFunction
    checkpoints: tuple[Checkpoint, ...]
    wrt: tuple[Params, ...]
    selected: tuple[str, ...]
    normalize: Literal[False, "cosine", "relatif"]
    update: Literal["gradient", "optimizer"]
    projection: Projection | None
    show_progress: bool


def make_spec(
    model: nn.Module,
    of: ScalarFunction,
    checkpoints: Any,
    *,
    params: str | Sequence[str] | Params | Sequence[Params],
    test_of: ScalarFunction | None,
    normalize: Literal[False, "cosine", "relatif"],
    projection: Projection | None,
    update: Literal["gradient", "optimizer"],
    show_progress: bool,
) -> Spec:
    """Check the arguments of a `TracIn`; all that can be refused is refused here, before work starts.

    Raises:
        GradregError: See `TracIn`.
    """
    check_compatible(model, differentiable=False)
    model = plain_module(model)
    check_grad_possible(model)
    if normalize is not False and normalize not in _NORMALIZE:
        raise GradregError(f"normalize={normalize!r}; allowed are False, 'cosine' and 'relatif'.")
    if update not in ("gradient", "optimizer"):
        raise GradregError(f"update={update!r}; allowed are 'gradient' and 'optimizer'.")
    if update == "optimizer" and normalize == "relatif":
        raise GradregError(
            "normalize='relatif' is a property of gradients; with update='optimizer' use 'cosine' or False."
        )
    if update == "optimizer" and projection is not None:
        raise GradregError("update='optimizer' needs whole gradients; with it, projection must be None.")
    train_of = _as_scalar(of, "of")
    wrt, selected = selected_parameters(model, params)
    return Spec(
        model=model,
        of=train_of,
        test_of=train_of if test_of is None else _as_scalar(test_of, "test_of"),
        checkpoints=tuple(as_checkpoints(checkpoints)),
        wrt=wrt,
        selected=selected,
        normalize=normalize,
        update=update,
        projection=projection,
        show_progress=show_progress,
    )


def _as_scalar(of: Any, name: str) -> ScalarFunction:
    """Take the losses of torch as `gr.loss` of them: their own reduction would divide by the batch size."""
    if isinstance(of, nn.Module) or getattr(of, "__module__", None) in ("torch.nn.functional", "torch._C._nn"):
        return loss(of)
    if not callable(of):
        raise ScalarError(
            f"{name}={of!r}; allowed are gr.loss(fn), other scalars and functions (outputs, batch) -> [n]."
        )
    found: ScalarFunction = of
    return found
