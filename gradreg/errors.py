"""The errors and warnings of gradreg.

Every error is a `GradregError`, hence a `ValueError`. A message says what was found, where, what is
allowed and what to do.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable

__all__ = [
    "AttributionWarning",
    "BatchError",
    "CheckpointError",
    "CompatibilityError",
    "ConstantScoreWarning",
    "CoupledExamplesError",
    "DetachedGradientError",
    "DisconnectedWarning",
    "GradregError",
    "GradregWarning",
    "HeadsError",
    "InPlaceError",
    "NonFiniteLossError",
    "RouteError",
    "ScalarError",
    "SlowRouteWarning",
    "UnboundedPenaltyWarning",
    "UnknownNameError",
    "ZeroSecondDerivativeWarning",
    "closest",
]


class GradregError(ValueError):
    """Base of all errors raised by gradreg."""


class BatchError(GradregError):
    """A batch that cannot be read: empty, of unequal lengths, of a wrong dtype, without what was asked of it."""


class ScalarError(GradregError):
    """A scalar to be differentiated (`of`) of the wrong shape, or one that does not fit the outputs."""


class UnknownNameError(GradregError):
    """A name or glob that matches nothing; the closest names are listed."""


class HeadsError(GradregError):
    """Heads that do not fit together: none, a single one to compare, or unequal output shapes."""


class CompatibilityError(GradregError):
    """A model or a surrounding context in which the wanted derivative does not exist or would be wrong."""


class CoupledExamplesError(CompatibilityError):
    """Examples are coupled between `wrt` and `of`, so a per-example gradient does not exist."""


class InPlaceError(CompatibilityError):
    """A captured tensor was changed in place by the model."""


class DetachedGradientError(CompatibilityError):
    """A gradient was to be differentiated again but carries no graph."""


class CheckpointError(GradregError):
    """A checkpoint that cannot be read, does not fit the model, or lacks what was asked of it."""


class RouteError(GradregError):
    """A route that was asked for by name but cannot be taken."""


class NonFiniteLossError(GradregError):
    """A part of the loss is NaN or infinite."""


class GradregWarning(UserWarning):
    """Base of all warnings of gradreg."""


class ZeroSecondDerivativeWarning(GradregWarning):
    """A penalty sends exactly nothing to a whole part of the model."""


class DisconnectedWarning(GradregWarning):
    """The scalar does not depend on what it is differentiated with respect to."""


class ConstantScoreWarning(GradregWarning):
    """The score of a critic does not depend on its inputs, because its outputs always have the same sum."""


class SlowRouteWarning(GradregWarning):
    """The model refuses the fast route; a slower one is taken."""


class AttributionWarning(GradregWarning):
    """Scores that are right, but may not say what is expected of them."""


class UnboundedPenaltyWarning(GradregWarning):
    """A penalty that has no lower bound keeps falling."""


def warn(message: str, category: type[GradregWarning]) -> None:
    """Warn at the line of the user's code, the first one outside gradreg and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None:
        frame, level = frame.f_back, level + 1
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("gradreg", "torch"):
            break
    warnings.warn(message, category, stacklevel=level)


def closest(name: str, candidates: Iterable[str], count: int = 5) -> str:
    """Return the closest candidates as a readable list, or the first few when none is close."""
    pool = [str(candidate) for candidate in candidates]
    if not pool:
        return "(there are none)"
    near = difflib.get_close_matches(name, pool, n=count, cutoff=0.4)
    tail = name.rsplit(".", 1)[-1].strip("*")
    near += [candidate for candidate in pool if tail and tail in candidate and candidate not in near]
    chosen = (near or pool)[:count]
    rest = len(pool) - len(chosen)
    return ", ".join(repr(candidate) for candidate in chosen) + (f" (and {rest} more)" if rest > 0 else "")
