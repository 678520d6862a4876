"""Finite differences that decide: is a gradient right, is it zero? With patience at kinks and jumps."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradreg.diagnosis._trial import Trial
from gradreg.model import walk

STEPS = (1e-4, 1e-5, 1e-6, 1e-7)
"""Relative steps; smaller ones straddle fewer kinks, larger ones drown less in rounding."""
LOW_PRECISION_STEPS = (1e-2, 3e-3, 1e-3)


@dataclass(frozen=True)
class Quotient:
    """A central difference: its step, the two values, their slope, its rounding error, and whether rounding is all there is."""

    step: float
    above: float
    below: float
    slope: float
    noise: float
    flat: bool


class Differences:
    """Central differences of a penalty.

    Args:
        trial: The penalty.
        double: Whether it is computed in float64.
    """

    def __init__(self, trial: Trial, double: bool) -> None:
        self.trial = trial
        self.steps = STEPS if double else LOW_PRECISION_STEPS
        self.agree = 1e-4 if double else 5e-2
        # rows that embeddings leave without gradient by intention
        self.padding = {
            f"{name}.weight".lstrip("."): module.padding_idx
            for name, module in walk(trial.inner)
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None
        }
        self.eps = torch.finfo(torch.float64 if double else torch.float32).eps

    def steady(self) -> bool:
        """Whether two evaluations give the same value."""
        first, second = self.trial.shifted({}, 0.0), self.trial.shifted({}, 0.0)
        return first == second

    def is_zero(self, names: Iterable[str], seed: int = 0) -> bool | None:
        """Return whether the penalty stays the same when these parameters move; None if that cannot be decided."""
        direction = {name: self._random(name, seed) for name in names}
        last: Quotient | None = None
        for step in self.steps:
            found = self._quotient(direction, step)
            if found.flat:
                return True
            if last is not None and self._contradict(last, found, 0.0) and self._smooth(direction, found, 0.0):
                return False
            last = found
        return None

    def is_right(self, gradients: Mapping[str, Tensor], seed: int = 0) -> bool | None:
        """Return whether gradients agree with differences along one direction; None if that cannot be decided.

        The direction is half random, half that of the gradients, scaled so that every parameter contributes alike.
        """
        direction = self._balanced(gradients, seed)
        known = float(sum(_along(gradients[name], value) for name, value in direction.items()))
        last: Quotient | None = None
        for step in self.steps:
            found = self._quotient(direction, step)
            size = max(abs(found.slope), abs(known))
            if found.noise > 0.01 * size:
                continue  # rounding hides the difference
            if abs(found.slope - known) <= self.agree * size + found.noise:
                return True
            if last is not None and self._contradict(last, found, known) and self._smooth(direction, found, known):
                return False
            last = found
        return None

    def _contradict(self, one: Quotient, other: Quotient, known: float) -> bool:
        """Whether two differences agree with each other far better than with what is known."""
        spread, gap = abs(one.slope - other.slope) + one.noise, abs(one.slope - known)
        return gap > 10 * spread and gap > 10 * self.agree * max(abs(one.slope), abs(known))

    def _smooth(self, direction: Mapping[str, Tensor], found: Quotient, known: float) -> bool:
        """Whether a difference may accuse: the same on both sides, so no kink lies right here, and no rounding in between.

        Kinks right here are common: ties of equal logits, black pixels under a ReLU without bias.
        """
        gap = abs(found.slope - known)
        middle = self.trial.shifted({}, 0.0)
        sides = abs((found.above - middle) - (middle - found.below)) / found.step
        tiny = 1e-12 if found.step < 1e-3 else 1e-7
        rough = max(abs(self.trial.shifted(direction, sign * tiny) - middle) for sign in (-1.0, 1.0))
        return sides < 0.2 * gap and rough / found.step < 0.2 * gap

    def _quotient(self, direction: Mapping[str, Tensor], step: float) -> Quotient:
        above, below = self.trial.shifted(direction, step), self.trial.shifted(direction, -step)
        rounding = 100 * self.eps * max(abs(above), abs(below), 1e-300)
        return Quotient(
            step, above, below, (above - below) / (2 * step), rounding / step / 10, abs(above - below) <= rounding
        )

    def _random(self, name: str, seed: int) -> Tensor:
        """Return a random direction of the size of a parameter."""
        start = self.trial.start[name]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
        random = torch.randn(start.shape, generator=generator, dtype=torch.float64)
        padding = self.padding.get(name)
        if padding is not None:
            random[padding] = 0
        size = max(float(start.abs().square().mean().sqrt()) if start.numel() else 0.0, 0.1)
        return (random * size).to(start)

    def _balanced(self, gradients: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
        direction: dict[str, Tensor] = {}
        shares: dict[str, float] = {}
        for name, gradient in gradients.items():
            random = self._random(name, seed)
            norm = float(gradient.abs().square().sum().sqrt())
            along = gradient * (float(random.abs().square().sum().sqrt()) / max(norm, 1e-300))
            direction[name] = random + along
            share = float(_along(gradient, direction[name]))
            if share < 0:
                direction[name], share = along, float(_along(gradient, along))
            shares[name] = share
        positive = [share for share in shares.values() if share > 0]
        target = max(min(positive, default=1.0), 1e-4 * max(positive, default=1.0))
        scales = {name: min(1.0, target / share) if share > 0 else 1.0 for name, share in shares.items()}
        largest = max(scales.values(), default=1.0)
        return {name: value * (scales[name] / largest) for name, value in direction.items()}


def _along(gradient: Tensor, direction: Tensor) -> Tensor:
    """Return the change along a direction; torch's gradients of complex parameters are conjugates."""
    product = gradient.conj() * direction
    return (product.real if product.is_complex() else product).sum()
