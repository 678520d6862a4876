"""The second derivative of one operation at the inputs that it really sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LINEAR = "linear"
PIECEWISE = "piecewise linear"
PARTLY = "partly curved"
CURVED = "curved"
RAISES = "raises"
WRONG = "wrong"

Function = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Curvature:
    """What was measured of an operation.

    Attributes:
        kind: One of `linear`, `piecewise linear`, `partly curved`, `curved`, `raises`, `wrong`.
        zero_share: The share of its inputs at which the second derivative is exactly zero.
        text: What torch said, where it raised; what disagrees, where it is wrong.
    """

    kind: str
    zero_share: float = 0.0
    text: str = ""


def curvature(function: Function, inputs: list[Tensor], *, verify: int = 0) -> Curvature:
    r"""Class an operation $y = f(x)$ by $\partial \langle u, \partial \langle v, y \rangle / \partial x \rangle / \partial x$.

    Directions $u$ and $v$ are random and fixed. Exact zeros everywhere mean linear or piecewise linear, which three values of
    $f$ on a line tell apart. The random streams are left alone; operations that draw numbers draw the same ones every time.

    Args:
        function: From tensors to tensors.
        inputs: Where to look; they are copied.
        verify: 2 compares the second derivative with finite differences of the first, 3 also the third with those of the
            second; disagreement is `wrong`.

    Returns:
        The class. An operation whose gradients do not depend on the inputs at all is `linear`.
    """
    try:
        return _classed(_steady(function), [tensor.detach() for tensor in inputs], verify)
    except (RuntimeError, NotImplementedError) as refusal:
        lines = str(refusal).strip().splitlines()
        return Curvature(RAISES, text=lines[0] if lines else type(refusal).__name__)


def _classed(function: Function, inputs: list[Tensor], verify: int) -> Curvature:
    us, points = _random_like(inputs, 1), _leaves(inputs)
    vs = _random_like(function(points), 2)
    # with a graph of its own, as in any network: some kernels refuse only then
    cotangents = _leaves(vs)
    slope = _inner_product(us, _first(function, points, cotangents))
    second = _derivative(slope, [*points, *cotangents], create=False)[: len(points)]
    total = sum(tensor.numel() for tensor in points)
    zeros = sum(
        tensor.numel() if s is None else tensor.numel() - int(s.count_nonzero())
        for tensor, s in zip(points, second, strict=True)
    )
    if any(s is not None and not bool(torch.isfinite(s).all()) for s in second):
        return Curvature(WRONG, zeros / max(total, 1), "its second derivative is not finite at an input")
    if verify >= 2:
        text = _disagreement(function, inputs, us, vs, second, verify)
        if text:
            return Curvature(WRONG, zeros / max(total, 1), text)
    if zeros == total:
        return Curvature(LINEAR if _is_affine(function, inputs) else PIECEWISE, 1.0)
    return Curvature(PARTLY if zeros else CURVED, zeros / total)


def _first(function: Function, points: list[Tensor], vs: list[Tensor]) -> list[Tensor | None]:
    outputs = function(points)
    return _derivative(_inner_product(vs, outputs), points, create=True)


def _derivative(value: Tensor, points: list[Tensor], *, create: bool) -> list[Tensor | None]:
    if not value.requires_grad:
        return [None] * len(points)
    return list(torch.autograd.grad(value, points, create_graph=create, retain_graph=True, allow_unused=True))


def _disagreement(
    function: Function,
    inputs: list[Tensor],
    us: list[Tensor],
    vs: list[Tensor],
    second: list[Tensor | None],
    verify: int,
) -> str:
    """Compare derivatives along a random direction with central differences of the derivatives one order below."""
    along = _random_like(inputs, 3)

    def slope_at(step: float) -> Tensor:
        first = _first(function, _leaves(_moved(inputs, along, step)), vs)
        return _inner_product(us, first).detach()

    if _differ(_inner_product(along, second), slope_at):
        return "its second derivative disagrees with finite differences of the first"
    if verify < 3:
        return ""
    points = _leaves(inputs)
    slope = _inner_product(us, _first(function, points, vs))
    curved = _inner_product(along, _derivative(slope, points, create=True))
    third = _inner_product(along, _derivative(curved, points, create=False))

    def curved_at(step: float) -> Tensor:
        moved = _leaves(_moved(inputs, along, step))
        slope = _inner_product(us, _first(function, moved, vs))
        return _inner_product(along, _derivative(slope, moved, create=False)).detach()

    return "its third derivative disagrees with finite differences of the second" if _differ(third, curved_at) else ""


def _differ(value: Tensor, at: Callable[[float], Tensor]) -> bool:
    """Whether a derivative disagrees with central differences of two step sizes that agree with each other."""
    if value.dtype != torch.float64 or at(0.0).dtype != torch.float64:
        return False  # differences of lower precision say nothing
    known = float(value.detach())
    found = [float(at(step) - at(-step)) / (2 * step) for step in (1e-4, 1e-5)]
    scale = max(abs(known), *(abs(value) for value in found), 1e-12)
    steady = abs(found[0] - found[1]) < 1e-3 * scale
    return steady and scale > 1e-9 and all(abs(known - value) > 1e-2 * scale for value in found)


def _inner_product(directions: list[Tensor], values: Sequence[Tensor | None]) -> Tensor:
    """Return the sum of products, its real part where complex; torch's gradients of complex tensors are conjugates."""
    total = torch.zeros(())
    for direction, value in zip(directions, values, strict=True):
        if value is not None:
            product = (direction * value.conj() if value.is_complex() else direction * value).sum()
            total = total + (product.real if product.is_complex() else product)
    return total


def _is_affine(function: Function, inputs: list[Tensor]) -> bool:
    """Whether the value in the middle of two inputs is the mean of their values."""
    others = [(0.3 - 1.7 * tensor).flip(0) if tensor.dim() else 0.3 - 1.7 * tensor for tensor in inputs]
    middle = [(a + b) / 2 for a, b in zip(inputs, others, strict=True)]
    try:
        with torch.no_grad():
            rows = zip(function(inputs), function(others), function(middle), strict=True)
            for one, other, mean in rows:
                scale = float(one.abs().max() + other.abs().max()) if one.numel() else 0.0
                precision = 1e3 * torch.finfo(one.dtype).eps
                if not bool(((one + other) / 2 - mean).abs().max() <= precision * max(scale, 1e-30)):
                    return False
    except (RuntimeError, ValueError, IndexError):
        return False  # an operation that takes only inputs of its kind, such as probabilities
    return True


def _steady(function: Function) -> Function:
    """Let an operation draw the same random numbers every time."""

    def run(points: list[Tensor]) -> list[Tensor]:
        devices = sorted({point.device.index or 0 for point in points if point.is_cuda})
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(0)  # torch.manual_seed walks the stack for devices that are not there
            for device in devices:
                torch.cuda.default_generators[device].manual_seed(0)
            # a layer that works in place shall not change the points themselves
            return function([point.clone() for point in points])

    return run


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def _moved(tensors: list[Tensor], along: list[Tensor], step: float) -> list[Tensor]:
    return [tensor + step * direction for tensor, direction in zip(tensors, along, strict=True)]


def _random_like(tensors: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # bounded away from zero, so that no product vanishes by chance
    return [
        ((0.5 + torch.rand(tensor.shape, generator=generator)) * _signs(tensor, generator)).to(tensor)
        for tensor in tensors
    ]


def _signs(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, tensor.shape, generator=generator) * 2.0 - 1.0
