"""Factors of linear layers: per-example weight gradients are outer products that need not be formed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._checks import check_batch_axes, check_independent
from gradreg.engine._observe import Capture, grad_mode, observe
from gradreg.engine._points import Points, resolve_params
from gradreg.engine._pull import pull
from gradreg.engine._recorder import version_of
from gradreg.engine._request import resolve
from gradreg.engine._session import current_session
from gradreg.errors import InPlaceError
from gradreg.model import devices_of, parameter_aliases, preserved
from gradreg.scalars import ScalarFunction
from gradreg.wrt import Activations, Params


@dataclass(frozen=True, eq=False)
class LinearFactors:
    r"""One linear layer, called once on `[n, in]`: example i's gradient is $\delta_i h_i^\top$; of the bias, $\delta_i$.

    Attributes:
        inputs: h, `[n, in]`, with graph.
        cotangents: delta, the gradient of each example's scalar at the layer's output, `[n, out]`, with graph.
        weight: Whether the weight was asked for.
        bias: Whether the bias was asked for.
    """

    inputs: Tensor
    cotangents: Tensor
    weight: bool
    bias: bool


def linear_factors(
    model: nn.Module, batch: Batch, of: ScalarFunction, wrt: tuple[Params, ...]
) -> dict[str, LinearFactors] | None:
    """Return factors of differentiable per-example gradients by the name of the layer, or None where they do not apply.

    They do where all chosen parameters are of `nn.Linear` layers that share them with nothing, are called once, and see
    `[n, in]`; in models without heads. What lies before a layer may mix examples (BatchNorm in train mode).

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        of: One value per example.
        wrt: The parameters.

    Returns:
        From layer to factors.

    Raises:
        InPlaceError: If what a layer was given was changed in place afterwards.
    """
    request = resolve(model, batch, of, wrt, differentiable=True)
    inner = request.inner
    names = _layers(inner, wrt) if request.heads is None else None
    if names is None:
        return None
    points = Points(activations=dict.fromkeys(names, 0), required=frozenset(names))
    asked = tuple(Activations(name) for name in names)
    session = current_session()
    served = None
    if session is not None and session.might_serve(model, batch, "example", None, True, "auto"):
        served = session.serve(of, asked, batch)
    if served is not None and session is not None:
        found, capture = served, session.capture
    else:
        with grad_mode(), preserved(inner, devices_of(inner)):
            capture = observe(model, request.batch, points, differentiable=True)
            if not _fits(capture, names, len(request.batch)):
                return None
            check_batch_axes(inner, request.batch, capture, points)
            found = pull(inner, capture, request.of, points, None, differentiable=True)
        check_independent(inner, request.batch, request.of, points, None, {})
    if not _fits(capture, names, len(request.batch)) or any(found[name].dim() != 2 for name in names):
        return None
    return {name: _factors(inner, name, capture, found[name], request.params) for name in names}


def _layers(inner: nn.Module, wrt: tuple[Params, ...]) -> list[str] | None:
    """Return the linear layers that hold the chosen parameters, None where another module does or something is shared."""
    aliases = parameter_aliases(inner)
    modules = list(inner.named_modules(remove_duplicate=False))
    if len({id(module) for _, module in modules}) < len(modules) or len(set(aliases.values())) < len(aliases):
        return None
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in resolve_params(inner, wrt)))
    return layers if all(name and type(inner.get_submodule(name)) is nn.Linear for name in layers) else None


def _fits(capture: Capture, names: list[str], n: int) -> bool:
    recorded = [capture.activations.get(name) for name in names]
    return all(
        item is not None and item.source is not None and item.source.dim() == 2 and len(item.source) == n
        for item in recorded
    )


def _factors(
    inner: nn.Module, name: str, capture: Capture, cotangents: Tensor, params: dict[str, nn.Parameter]
) -> LinearFactors:
    recorded = capture.activations[name]
    assert recorded.source is not None
    if version_of(recorded.source) != recorded.version:
        raise InPlaceError(
            f"What the layer {name!r} was given was changed in place later in the forward, so its gradient cannot be read from "
            "it. Use out-of-place operations behind that layer's input (inplace=False)."
        )
    return LinearFactors(recorded.source, cotangents, f"{name}.weight" in params, f"{name}.bias" in params)
