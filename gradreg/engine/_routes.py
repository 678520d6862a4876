"""Which route a request takes, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import shorten
from weakref import WeakKeyDictionary

from torch import nn

from gradreg.engine._request import Request
from gradreg.errors import RouteError
from gradreg.model import train_mode_batch_norms
from gradreg.scalars import scalar_key

# Why forward mode refused a model with a scalar, so that it is tried once
_FORWARD_REFUSALS: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], str]] = WeakKeyDictionary()

# Why vmap refused a model with a scalar, in train and in eval mode, so that it is tried once
_VMAP_REFUSALS: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], str]] = WeakKeyDictionary()

# What torch says when it refuses vmap or forward mode, and what that means
_MEANINGS = {
    "data-dependent control flow": "its code branches on values of tensors",
    "calling .item()": "its code reads values of tensors",
    "output dynamic shape": "a shape inside it depends on values, as where an end token is searched for",
    "is not possible because there exists a Tensor": "it writes into a tensor that it made without the axis of examples",
    "randomness error mode": "it draws random numbers",
    "calling Tensor.requires_grad_()": "a hook in it sets requires_grad, as in models that checkpoint activations in train mode",
    "setup_context": "it has an autograd.Function of its own, or activations are checkpointed",
    "Batching rule not implemented": "an operation in it has no batching rule",
    "forward AD": "an operation in it has no forward mode",
}


@dataclass
class Decision:
    """The routes of the two halves of a request, and why the others were not taken.

    Attributes:
        points: The route to inputs, features, activations and outputs; None where none is asked for.
        params: The route to parameters; None where none is asked for.
        joint: For the loop to parameters: one forward for all examples.
        rejected: From route to the reason.
    """

    points: str | None = None
    params: str | None = None
    joint: bool = False
    rejected: dict[str, str] = field(default_factory=dict)

    @property
    def route(self) -> str:
        """The routes as one word."""
        return " + ".join(dict.fromkeys(name for name in (self.points, self.params) if name))


def decide(request: Request, *, factors: bool = True) -> Decision:
    """Choose the routes of a request.

    Raises:
        RouteError: If a route was asked for that cannot be taken.
    """
    decision = Decision()
    norms = train_mode_batch_norms(request.inner)
    if request.points:
        decision.points = _points_route(request, norms, decision)
    if request.params:
        decision.params = _params_route(request, norms, decision, factors)
    taken = {decision.points, decision.params}
    if request.route not in ("auto", *taken):
        raise RouteError(
            f"route={request.route!r} cannot be taken: {decision.rejected.get(request.route, 'it does not apply')}. "
            f'route="auto" takes {decision.route!r}.'
        )
    return decision


def _points_route(request: Request, norms: list[str], decision: Decision) -> str:
    decision.rejected.setdefault("vmap", "vmap serves parameters per example; points are captured in one forward")
    decision.rejected.setdefault("batch", "batch serves parameters per group or batch")
    if request.route == "loop":
        if norms:
            decision.rejected["loop"] = _norm_text(norms)
            return "capture"
        return "loop"
    decision.rejected.setdefault("loop", "one forward serves all examples")
    return "capture"


def _params_route(request: Request, norms: list[str], decision: Decision, factors: bool) -> str:
    decision.rejected["capture"] = "capture serves inputs, features, activations and outputs"
    if request.per != "example":
        # sums need one backward each, whatever route serves the points
        decision.rejected["vmap"] = f"per={request.per!r} costs one backward per sum instead of one per example"
        decision.rejected["loop"] = decision.rejected["vmap"]
        decision.rejected.pop("batch", None)
        return "batch"
    decision.rejected["batch"] = 'batch serves per="group" and per="batch"'
    unfit = factors_refusal(request, norms) if factors else "it was tried"
    if unfit is None and request.route in ("auto", "factors"):
        for other in ("vmap", "loop"):
            decision.rejected[other] = "one ordinary forward and backward gives the factors of all examples"
        return "factors"
    decision.rejected["factors"] = unfit or f"route={request.route!r} was asked for"
    decision.joint = bool(norms)
    if len(request.batch) == 1 and request.route == "auto":
        decision.rejected["vmap"] = "there is one example"
        return "loop"
    refusal = _vmap_refusal(request, norms)
    if request.route == "loop":
        decision.rejected["vmap"] = refusal or "the loop was asked for"
        return "loop"
    if refusal is None:
        decision.rejected["loop"] = "one forward and backward per example is slower"
        return "vmap"
    decision.rejected["vmap"] = refusal
    return "loop"


def factors_refusal(request: Request, norms: list[str]) -> str | None:
    """Return why layer factors cannot serve a request at all, if so."""
    if request.differentiable:
        return "layer factors carry no graph; differentiable=True needs one"
    if request.at:
        return "at replaces values inside the model"
    if request.randomness != "different":
        return f"randomness={request.randomness!r} asks for a forward per example"
    if norms:
        return _norm_text(norms)
    return None


def _vmap_refusal(request: Request, norms: list[str]) -> str | None:
    if norms:
        return _norm_text(norms)
    inside = [name for name in request.at if name not in request.params and name not in request.points.inputs]
    if inside:
        return f"at replaces {', '.join(map(repr, inside))} inside the model"
    return _VMAP_REFUSALS.get(request.inner, {}).get(_refusal_key(request))


def _norm_text(norms: list[str]) -> str:
    names = ", ".join(map(repr, norms[:3]))
    return f"BatchNorm in train mode ({names}) couples the examples of a forward"


def refusal_text(refusal: BaseException) -> str:
    """Return in plain words, where they are known, why a transform is refused, and the beginning of what torch says."""
    lines = str(refusal).splitlines()
    told = f"{type(refusal).__name__}: {shorten(lines[0] if lines else '', width=160, placeholder=' ...')}"
    meaning = next((words for part, words in _MEANINGS.items() if part in str(refusal)), None)
    return told if meaning is None else f"{meaning}; {told}"


def note_vmap_refusal(request: Request, reason: str) -> bool:
    """Remember that vmap refused the model; return whether this is news."""
    known = _VMAP_REFUSALS.setdefault(request.inner, {})
    news = not known
    known[_refusal_key(request)] = reason
    return news


def forward_refusal(request: Request) -> str | None:
    """Return why forward mode refused the model, if it did."""
    return _FORWARD_REFUSALS.get(request.inner, {}).get(_refusal_key(request))


def note_forward_refusal(request: Request, reason: str) -> bool:
    """Remember that forward mode refused the model; return whether this is news."""
    known = _FORWARD_REFUSALS.setdefault(request.inner, {})
    news = not known
    known[_refusal_key(request)] = reason
    return news


def _refusal_key(request: Request) -> tuple[object, ...]:
    return (*scalar_key(request.of), request.inner.training, request.randomness)
