"""Derivatives of outputs with respect to coordinates, of any order, taken when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._checks import check_independent
from gradreg.engine._coupling import check_uncoupled
from gradreg.engine._evaluate import check_targets, evaluate
from gradreg.engine._observe import Capture, grad_mode, observe
from gradreg.engine._points import Points
from gradreg.engine._pull import warn_disconnected
from gradreg.engine._request import resolve
from gradreg.engine._session import current_session
from gradreg.errors import BatchError, GradregError, HeadsError, ZeroSecondDerivativeWarning, closest, warn
from gradreg.model import devices_of, preserved
from gradreg.scalars import AcrossHeads, ScalarFunction
from gradreg.wrt import Inputs

Axis = int | str | tuple[str, int]


class Derivatives:
    r"""Outputs u and their derivatives with respect to the coordinates of the inputs, in one graph.

    Everything is computed at first use and kept: $\partial^2 u / \partial x_0 \partial x_1$ after
    $\partial^2 u / \partial x_0^2$ costs nothing, for one pullback gives a derivative's whole gradient. Each order is a
    reverse pass through the one before, so all of them can be trained on, also through layer and instance normalization,
    which are written out (their kernels are wrong from the third order on).

    Coordinates are called by position, 0 to d - 1, over all inputs together. Those of a named input that is `[n]` or `[n, 1]`
    are also called by its name, others `("name", 2)`.

    Attributes:
        batch: The batch, with its targets, groups and extras.
        u: The outputs: `[n]` where the model has one output per example, else `[n, m]`.

    Raises:
        BatchError: If an input is not `[n]` or `[n, d]`.
    """

    def __init__(self, values: Tensor, points: dict[str, Tensor], batch: Batch) -> None:
        self.batch, self._points = batch, points
        self._columns = values.flatten(1).unbind(1) if values.dim() > 1 else (values,)
        self.u: Tensor = torch.stack(self._columns, 1) if len(self._columns) > 1 else self._columns[0]
        self._places: list[tuple[str, int]] = []
        self._names: dict[Axis, int] = {}
        for name, value in points.items():
            if value.dim() not in (1, 2):
                raise BatchError(
                    f"Input {name!r} has shape {tuple(value.shape)}; coordinates are inputs of shape [n] or [n, d]."
                )
            for position in range(value.shape[1] if value.dim() == 2 else 1):
                self._names[name, position] = len(self._places)
                if value.numel() == len(value):
                    self._names[name] = len(self._places)
                self._places.append((name, position))
        self._known: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    @property
    def x(self) -> Tensor:
        """The coordinates at which derivatives are taken, `[n, d]`."""
        return _columns(self._points.values())

    @property
    def gradient(self) -> Tensor:
        r"""$\partial u / \partial x$: `[n, d]`, for several outputs `[n, m, d]`."""
        return self._stacked([self._gradient(column, ()) for column in range(len(self._columns))])

    def derivative(self, *axes: Axis, output: int | None = None) -> Tensor:
        r"""The partial derivative $\partial^k u / \partial x_{a_1} \cdots \partial x_{a_k}$.

        Args:
            axes: One coordinate per order: `derivative(0)` is $u_x$, `derivative(0, 0)` $u_{xx}$, `derivative(0, 1)` $u_{xy}$.
            output: For several outputs, the one that is wanted; None: all.

        Returns:
            `[n]`, or `[n, m]` for all of several outputs.

        Raises:
            GradregError: If there is no such coordinate or output.
        """
        order = tuple(sorted(self._axis(axis) for axis in axes))
        if not order:
            raise GradregError("derivative() needs at least one coordinate, such as derivative(0); u itself is `u`.")
        if output is not None and not 0 <= output < len(self._columns):
            raise GradregError(f"output={output}; the model has {len(self._columns)} outputs per example.")
        wanted = range(len(self._columns)) if output is None else [output]
        found = [self._partial(column, order) for column in wanted]
        return found[0] if output is not None else self._stacked(found)

    @property
    def laplacian(self) -> Tensor:
        r"""$\sum_a \partial^2 u / \partial x_a^2$ over all coordinates: `[n]`, for several outputs `[n, m]`.

        One pullback per coordinate; no Hessian is held.
        """
        axes = range(len(self._places))
        return self._stacked(
            [torch.stack([self._partial(c, (a, a)) for a in axes]).sum(0) for c in range(len(self._columns))]
        )

    @property
    def divergence(self) -> Tensor:
        r"""$\sum_a \partial u_a / \partial x_a$, `[n]`; the outputs are a vector field with one output per coordinate.

        Raises:
            GradregError: If there are not as many outputs as coordinates.
        """
        if len(self._columns) != len(self._places):
            raise GradregError(
                f"The divergence needs one output per coordinate; there are {len(self._columns)} outputs and "
                f"{len(self._places)} coordinates."
            )
        return torch.stack([self._partial(a, (a,)) for a in range(len(self._places))]).sum(0)

    def _axis(self, axis: Axis) -> int:
        if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < len(self._places):
            return axis
        if axis in self._names:
            return self._names[axis]
        named = [str(name) for name in self._names]
        raise GradregError(
            f"There is no coordinate {axis!r}; allowed are 0 to {len(self._places) - 1}, {closest(str(axis), named)}."
        )

    def _partial(self, column: int, order: tuple[int, ...]) -> Tensor:
        return self._gradient(column, order[:-1])[:, order[-1]] if order else self._columns[column]

    def _gradient(self, column: int, order: tuple[int, ...]) -> Tensor:
        """Return the gradient `[n, d]` of a partial derivative of one output."""
        if (column, order) not in self._known:
            points = list(self._points.values())
            found: tuple[Tensor | None, ...] = (None,) * len(points)
            with grad_mode():  # also around taking columns: under no_grad a column would be a constant
                value = self._partial(column, order)
                if value.requires_grad:
                    found = torch.autograd.grad(value.sum(), points, create_graph=True, allow_unused=True)
                filled = [
                    torch.zeros_like(point) if part is None else part for part, point in zip(found, points, strict=True)
                ]
                self._known[column, order] = _columns(filled)
        return self._known[column, order]

    def warn_where_flat(self) -> None:
        """Warn if derivatives of order two or more were taken and all are exactly zero."""
        higher = [gradient for (_, order), gradient in self._known.items() if order]
        if higher and not any(bool(gradient.detach().count_nonzero()) for gradient in higher):
            warn(
                "All derivatives of order two and more of the outputs are exactly zero on this batch: piecewise-linear "
                "activations (ReLU) have none. Use a smooth one: nn.Tanh(), nn.SiLU(), nn.GELU().",
                ZeroSecondDerivativeWarning,
            )

    def _stacked(self, columns: list[Tensor]) -> Tensor:
        return columns[0] if len(columns) == 1 else torch.stack(columns, 1)


def derivatives(model: nn.Module, batch: Any, of: ScalarFunction, wrt: Inputs) -> Derivatives:
    """Return the outputs of one forward, with their derivatives with respect to inputs on demand, all with graph.

    Args:
        model: A model without heads.
        batch: As in `gradients`; inputs that require grad stay attached.
        of: `(outputs, batch) -> [n]` or `[n, m]`.
        wrt: Which inputs are the coordinates.

    Returns:
        The outputs and their derivatives. The model is left as it was.

    Raises:
        HeadsError: If the model has heads.
    """
    request = resolve(model, batch, of, wrt, differentiable=True)
    inner, session = request.inner, current_session()
    if request.heads is not None and not isinstance(request.of, AcrossHeads):
        raise HeadsError(
            f"Derivatives of order above one are of a model without heads; this is a {type(inner).__name__}. Take one of its "
            "heads, or mix them with across_heads(of)."
        )
    shared = session is not None and batch is session.batch and session.points.covers(request.points)
    capture: Capture | None = None
    if session is not None and shared and session.might_serve(model, batch, "example", None, True, "auto"):
        capture = session.capture
    with grad_mode(), preserved(inner, devices_of(inner)):
        capture = capture or observe(model, request.batch, request.points, differentiable=True)
        check_targets(request.of, capture.outputs, capture.batch)
        values = evaluate(request.of, capture.outputs, capture.batch, request.heads)
    names = request.points.inputs
    points = {name: capture.inputs[name] for name in names}
    check_uncoupled(values, points.values(), capture.normalized, ", ".join(map(repr, names)))
    check_independent(inner, request.batch, request.of, Points(inputs=names), request.heads, {})
    if not values.requires_grad:
        warn_disconnected(request.of, names)
    with grad_mode():
        return Derivatives(values, points, request.batch)


def _columns(tensors: Iterable[Tensor]) -> Tensor:
    columns = [tensor.unsqueeze(1) if tensor.dim() == 1 else tensor for tensor in tensors]
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)
