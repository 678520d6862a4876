"""Why a part of a model hears nothing: the operations on the path, each classed at the inputs that it saw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gradreg.diagnosis._remedies import remedy
from gradreg.diagnosis._report import Cause
from gradreg.engine import CURVED, PARTLY, PIECEWISE, RAISES, WRONG, Call, GradientCall, Record, probe


@dataclass
class Classed:
    """An operation on a path with its class."""

    call: Call
    curvature: str
    text: str
    low: float
    high: float

    def cause(self) -> Cause:
        """Return it as a cause."""
        call = self.call
        kind = call.kind if call.function is None or call.kind == call.function.__name__ else _both(call)
        named = call.function.__name__ if call.function is not None else call.kind
        advice = remedy(self.curvature, named, self.text, call.function is not None)
        return Cause(call.name, kind, self.curvature, advice, self.low, self.high, self.text)


def on_paths(record: Record, paths: Iterable[GradientCall]) -> list[tuple[Call, list[int]]]:
    """Return the operations between what is differentiated and with respect to what, with their active arguments."""
    found: dict[int, tuple[Call, list[int]]] = {}
    for path in paths:
        for call in record.calls:
            if path.passes(call):
                known = found.get(id(call), (call, []))[1]
                found[id(call)] = (call, sorted({*known, *path.active(call)}))
    return list(found.values())


def inside(calls: Iterable[tuple[Call, list[int]]]) -> list[tuple[Call, list[int]]]:
    """Return the operations inside modules where there are any: what remains belongs to the scalar."""
    given = list(calls)
    return [item for item in given if not item[0].outside] or given


def classed(calls: Iterable[tuple[Call, list[int]]], verify: int = 0) -> list[Classed]:
    """Class operations."""
    results = []
    for call, active in calls:
        found = probe(call, active, verify=verify)
        spans = [call.spans[i] for i in active] or call.spans[:1] or [(0.0, 0.0)]
        low, high = min(span[0] for span in spans), max(span[1] for span in spans)
        results.append(Classed(call, found.kind, found.text, low, high))
    return results


def blockers(operations: list[Classed], *, also_curved: bool) -> list[Cause]:
    """Return what keeps a path from being curved: its piecewise-linear operations, or the whole path if it is linear.

    Args:
        operations: Those of the path.
        also_curved: Whether what is curved is named where nothing else is, for it may be so by too little.

    Returns:
        The causes; none where the path is curved and something else is the matter.
    """
    curved = [operation for operation in operations if operation.curvature in (PARTLY, CURVED)]
    found = [operation for operation in operations if operation.curvature in (PIECEWISE, RAISES, WRONG)]
    if curved and (also_curved or not found):
        found = [*found, *curved] if also_curved else []
        return merged(operation.cause() for operation in found)
    if any(operation.curvature == CURVED for operation in curved):
        return []
    return merged(operation.cause() for operation in found) or _linear(operations)


def raising(operations: list[Classed]) -> list[Cause]:
    """Return the operations whose derivatives raise."""
    return merged(operation.cause() for operation in operations if operation.curvature == RAISES)


def wrong(operations: list[Classed]) -> list[Cause]:
    """Return the operations whose derivatives are wrong."""
    return merged(operation.cause() for operation in operations if operation.curvature == WRONG)


def merged(causes: Iterable[Cause]) -> list[Cause]:
    """Return every operation once, with the range of all its calls."""
    found: dict[tuple[str, str, str], Cause] = {}
    for cause in causes:
        key = (cause.name, cause.kind, cause.curvature)
        known = found.get(key)
        if known is None:
            found[key] = cause
        elif known.low is not None and known.high is not None and cause.low is not None and cause.high is not None:
            found[key] = replace(known, low=min(known.low, cause.low), high=max(known.high, cause.high))
    return list(found.values())


def _linear(operations: list[Classed]) -> list[Cause]:
    """Return the modules of a linear path, a head as one; functions only where there are no modules."""
    modules = [operation for operation in operations if operation.call.module is not None]
    found: dict[str, Cause] = {}
    for operation in modules or operations:
        cause = operation.cause()
        parts = cause.name.split(".")
        if parts[0] in ("heads", "models") and len(parts) > 1:
            cause = replace(cause, name=".".join(parts[:2]), kind=f"{parts[0][:-1]}", low=None, high=None)
        found.setdefault(cause.name + cause.kind, cause)
    return list(found.values())


def _both(call: Call) -> str:
    return f"{call.kind} with {call.function.__name__}" if call.function is not None else call.kind
