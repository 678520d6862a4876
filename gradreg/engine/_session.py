"""A session: one forward per training step, shared by the task and all regularizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._checks import check_batch_axes, check_independent
from gradreg.engine._evaluate import check_targets, evaluate, evaluate_checked
from gradreg.engine._observe import Capture, grad_mode, observe
from gradreg.engine._params import pulled, stacked
from gradreg.engine._points import Points, resolve_params, resolve_points
from gradreg.engine._pull import pull, warn_disconnected
from gradreg.engine._request import head_count
from gradreg.engine._scale import scaled, unscaled
from gradreg.engine._tokens import prepared
from gradreg.errors import GradregError, InPlaceError
from gradreg.model import all_modules, check_compatible, unwrap
from gradreg.scalars import AcrossHeads, ScalarFunction, bind
from gradreg.wrt import Features, Params, Wrt, as_wrt

Share = tuple[ScalarFunction, "Wrt | tuple[Wrt, ...]"]

# Structures are checked at the first step with a model and when it has grown, not at every step
_COMPATIBLE: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

_SESSION: ContextVar[Session | None] = ContextVar("gradreg_session", default=None)


def current_session() -> Session | None:
    """Return the open session, if any."""
    return _SESSION.get()


class Session:
    """The one captured forward of a model on a batch, and pullbacks from it.

    Args:
        model: The model as it is called in training, wrappers included.
        batch: The batch; requests are recognized by this very object.
        shares: The (of, wrt) pairs that regularizers announced; what they name is recorded, and pairs with the same `of` are
            served by one pullback.
    """

    def __init__(self, model: nn.Module, batch: Batch, shares: Iterable[Share]) -> None:
        self.model, self.inner, self.batch = model, unwrap(model), batch
        self.heads = head_count(self.inner)
        self._wanted: list[tuple[ScalarFunction, Points]] = []
        self._served: list[tuple[ScalarFunction, Points, dict[str, Tensor]]] = []
        self._capture: Capture | None = None
        self._state: _State | None = None
        self._versions: dict[int, int] = {}
        self.points = Points()
        self._for_params = False
        self._resolved: dict[tuple[Wrt, ...], Points] = {}
        self._bindings: list[tuple[ScalarFunction, ScalarFunction]] = []
        for of, wrt in shares:
            items = as_wrt(wrt)
            if any(isinstance(item, Params) for item in items):
                # gradients of sums over the batch are pulled back through the shared forward, which must allow it
                self._for_params = True
                if all(isinstance(item, Params) for item in items):
                    continue
                raise GradregError("shares() names Params() beside points; announce them as two pairs.")
            points = self._points(items)
            self._wanted.append((self._bound(of), points))
            self.points = self.points.merged(points)
        self._modules = all_modules(self.inner)
        if _COMPATIBLE.get(model) != len(self._modules):
            check_compatible(model, differentiable=True)
            _COMPATIBLE[model] = len(self._modules)

    @property
    def capture(self) -> Capture:
        """The forward, run at first need. It advances buffers and random streams as any training forward does."""
        if self._capture is None:
            with grad_mode():
                self._capture = observe(
                    self.model,
                    prepared(self.inner, self.batch),
                    self.points,
                    differentiable=bool(self.points) or self._for_params,
                    protect=False,
                    fuse=self._only_scalar(),
                    modules=self._modules,
                )
            check_batch_axes(self.inner, self.batch, self._capture, self.points)
            self._state = _State(self._modules)
        return self._capture

    def _only_scalar(self) -> ScalarFunction | None:
        """Return the scalar, where a single one was announced."""
        if not self._wanted or any(of != self._wanted[0][0] for of, _ in self._wanted):
            return None
        if getattr(self._wanted[0][0], "reads_extras", False):
            return None  # its extras are drawn after the forward
        return self._wanted[0][0]

    @property
    def outputs(self) -> Any:
        """The outputs of the shared forward."""
        return self.capture.outputs

    def might_serve(
        self,
        model: nn.Module,
        batch: Any,
        per: str,
        at: Mapping[str, Tensor] | None,
        differentiable: bool,
        route: str,
    ) -> bool:
        """Whether a call is about this session's model and batch, in the way that the shared forward can answer."""
        same = isinstance(batch, Batch) and batch.same_data(self.batch) and (model is self.model or model is self.inner)
        wanted = "capture" if per == "example" else "batch"
        useful = differentiable if per == "example" else per == "batch"
        if not (same and useful and not at and route in ("auto", wanted)):
            return False
        # a regularizer that moved parameters or modes for a while asks about another function than the captured one
        return self._state is None or self._state.holds()

    def serve(self, of: ScalarFunction, wrt: Wrt | tuple[Wrt, ...], batch: Batch) -> dict[str, Tensor] | None:
        """Return gradients from the shared forward, or None where it did not record what is asked.

        Args:
            of: The scalar.
            wrt: What was asked for.
            batch: The batch of this session, or the same data with other extras.
        """
        items = as_wrt(wrt)
        if any(isinstance(item, Params) for item in items):
            return None
        points = self._points(items)
        if not self.points.covers(points):
            return None
        of = self._bound(of)
        if batch is not self.batch:
            return self._with_extras(of, points, batch)
        fused = self.capture.fused
        if fused is not None:
            if fused[0] != of:
                return None
            check_independent(self.inner, self.batch, of, points, self.heads, {})
            return self._handed_out({"features": fused[1]})
        for known, covered, results in self._served:
            if known == of and covered.covers(points):
                return self._handed_out(self._select(results, points))
        wanted = points
        for announced, more in self._wanted:
            if announced == of and not wanted.covers(more):
                wanted = wanted.merged(more)
        with grad_mode():
            results = pull(self.inner, self.capture, of, wanted, self.heads, differentiable=True)
        check_independent(self.inner, self.batch, of, points, self.heads, {})
        self._served.append((of, wanted, results))
        return self._handed_out(self._select(results, points))

    def serve_factors(
        self,
        of: ScalarFunction,
        wrt: Wrt | tuple[Wrt, ...],
        batch: Batch,
        worthwhile: Callable[[int, Sequence[int], int], bool],
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Return per head the two factors of its gradients at the features, or None where the forward has none.

        Those are the gradient at the output of the head's first linear layer, `[n, h]`, and the layer's weight, `[h, d]`; their
        product is the gradient.
        """
        items = as_wrt(wrt)
        if batch is not self.batch or any(not isinstance(item, Features) for item in items) or not self.points.features:
            return None
        of, first = self._bound(of), self.capture.first
        if first is None or isinstance(of, AcrossHeads):
            return None
        if not worthwhile(len(batch), [len(weight) for _, weight in first], first[0][1].shape[1]):
            return None
        outputs = [output for output, _ in first]
        with grad_mode():
            scalars = evaluate_checked(of, self.capture.outputs, self.capture.batch, self.heads)
            if scalars.dim() != 2:
                return None
            found = torch.autograd.grad(scaled(scalars.sum()), outputs, create_graph=True, allow_unused=True)
        if any(gradient is None for gradient in found):
            return None
        check_independent(self.inner, self.batch, of, self._points(items), self.heads, {})
        return [(unscaled(gradient), weight) for gradient, (_, weight) in zip(found, first, strict=True)]

    def _with_extras(self, of: ScalarFunction, points: Points, batch: Batch) -> dict[str, Tensor] | None:
        """Pull back a scalar that reads extras of its own, such as random projections drawn for one regularizer."""
        if self.capture.fused is not None:
            return None  # the forward has no copies of the features to differentiate with respect to
        capture = replace(self.capture, batch=replace(self.capture.batch, extras=batch.extras))
        with grad_mode():
            results = pull(self.inner, capture, of, points, self.heads, differentiable=True)
        check_independent(self.inner, batch, of, points, self.heads, {})
        return results

    def serve_sum(
        self, of: ScalarFunction, wrt: Wrt | tuple[Wrt, ...], mean: bool, differentiable: bool
    ) -> dict[str, Tensor] | None:
        """Return parameter gradients of the sum or mean over the batch, or None where parameters were not announced."""
        items = as_wrt(wrt)
        if not self._for_params or not all(isinstance(item, Params) for item in items):
            return None
        selected: dict[str, Tensor] = dict(resolve_params(self.inner, items))
        of, capture = bind(of, self.inner), self.capture
        check_targets(of, capture.outputs, capture.batch)
        with grad_mode():
            scalars = evaluate(of, capture.outputs, capture.batch, self.heads)
            if self.heads is not None and not isinstance(of, AcrossHeads):
                scalars = scalars.sum(1)
            if not scalars.requires_grad:
                return None
            total = scalars.mean(0) if mean else scalars.sum(0)
            row = pulled(total, selected, differentiable)
        if all(gradient is None for gradient in row.values()):
            warn_disconnected(of, selected)
        return {name: value.squeeze(0) for name, value in stacked([row], selected, total.shape).items()}

    def _handed_out(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return results that several regularizers may read, unless one of them wrote to them."""
        for name, value in results.items():
            if self._versions.setdefault(id(value), value._version) != value._version:
                raise InPlaceError(
                    f"The gradients {name!r} of this step were changed in place by one regularizer before another one read them; "
                    "use out-of-place operations (g = g * 2 instead of g *= 2)."
                )
        return results

    def _bound(self, of: ScalarFunction) -> ScalarFunction:
        for given, known in self._bindings:
            if given is of:
                return known
        self._bindings.append((of, bind(of, self.inner)))
        return self._bindings[-1][1]

    def _points(self, items: tuple[Wrt, ...]) -> Points:
        if items not in self._resolved:
            self._resolved[items] = resolve_points(self.inner, self.batch, items)
        return self._resolved[items]

    def _select(self, results: dict[str, Tensor], points: Points) -> dict[str, Tensor]:
        names = {*points.inputs, *(["features"] if points.features else []), *(["outputs"] if points.outputs else [])}

        def is_wanted(key: str) -> bool:
            name, _, call = key.partition("#")
            return key in names or (
                name in points.activations and int(call or 0) in points.calls.get(name, {int(call or 0)})
            )

        return {key: value for key, value in results.items() if is_wanted(key)}


class _State:
    """What a forward depended on: identities and versions of parameters, and modes."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modes = [(vars(module), module.training) for module in modules]
        self.parameters = [
            (module._parameters, name, tensor, tensor._version)
            for module in modules
            for name, tensor in module._parameters.items()
            if tensor is not None
        ]

    def holds(self) -> bool:
        """Whether nothing has moved since."""
        return all(attributes["training"] is mode for attributes, mode in self.modes) and all(
            table.get(name) is tensor and tensor._version == version for table, name, tensor, version in self.parameters
        )


@contextmanager
def open_session(model: nn.Module, batch: Batch, shares: Iterable[Share]) -> Iterator[Session]:
    """Open a session in which `gradients(model, batch, ..., differentiable=True)` reads one captured forward.

    Args:
        model: The model as it is called in training.
        batch: The batch.
        shares: The (of, wrt) pairs that will be asked for.

    Yields:
        The session.
    """
    session = Session(model, batch, shares)
    token = _SESSION.set(session)
    try:
        yield session
    finally:
        _SESSION.reset(token)
