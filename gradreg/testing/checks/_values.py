"""The value, and how it moves with the examples: reference, additivity, permutation, duplicates, chunks."""

from __future__ import annotations

import copy
import math

from gradreg.errors import GradregError
from gradreg.testing.checks._report import NotApplicable, PropertyError
from gradreg.testing.checks._trial import Subject, Trial, close, demand

_COUPLED = (
    "Usually: a loss averaged over the batch lies inside, so that every gradient carries 1/n (use the summed "
    "or unreduced loss), or "
    "examples are mixed."
)


def value(subject: Subject) -> str:
    """The value equals that of the naive `reference`."""
    if subject.reference is None:
        raise NotApplicable("no reference= was given; `additive` compares with single examples where it can")
    trial = subject.trial()
    found = trial.number()
    with trial.undisturbed():
        expected = float(subject.reference(trial.model, trial.batch).detach())
    demand(
        close(found, expected),
        f"The value is {found:.12g}, the reference gives {expected:.12g} (difference {found - expected:.2e}).\n"
        f"Usually: an axis, a "
        "factor or a reduction differs.",
    )
    return f"{found:.6g}"


def additive(subject: Subject) -> str:
    """The value is the mean or the sum of the values of single examples, also in chunks, exactly where this is declared."""
    declared = subject.additive if subject.declared is None else subject.declared.additive
    _needs_fixed_randomness(subject)
    trial = subject.trial()
    n, total = len(trial.batch), trial.number()
    try:
        singles = [trial.number(trial.batch[i : i + 1]) for i in range(n)]
    except GradregError as problem:
        if declared:
            raise PropertyError(
                f"Declared additive=True, but one example alone is refused: {problem}\nA mean or sum over "
                f"examples exists for one."
            ) from problem
        raise NotApplicable("one example alone is refused, and additive is not declared") from problem
    mean, found = math.fsum(singles) / n, _reduction(total, singles)
    if declared is False:
        return "not additive, as declared" if found is None else f"the {found} over examples here, though not declared"
    if found is None:
        if declared is None:
            return f"not additive: {total:.6g} on {n} examples, {mean:.6g} on average alone"
        raise PropertyError(
            f"Declared additive=True, but the value on {n} examples is {total:.8g}, while single examples "
            f"give {mean:.8g} on average "
            f"and {mean * n:.8g} in sum.{_power(total, mean, n)}\n{_COUPLED} If it couples them on purpose, "
            f"declare additive = False."
        )
    wanted = _declared_reduction(subject)
    demand(
        wanted in (None, found) or mean == 0,
        f"The reduction is declared as {wanted!r}, but the value {total:.8g} is the {found} over examples.",
    )
    _check_chunks(trial, total, found)
    return f"the {found} over examples"


def permutation(subject: Subject) -> str:
    """Permuting the examples changes nothing."""
    _needs_fixed_randomness(subject)
    trial = subject.trial()
    before = trial.number()
    n = len(trial.batch)
    for order in ([*range(1, n), 0], list(reversed(range(n)))):
        after = trial.number(trial.batch[order])
        demand(
            close(before, after),
            f"With the examples in the order {order} the value is {after:.12g} instead of {before:.12g} (difference "
            f"{after - before:.2e}).\nUsually: neighbors are compared, weights go by position, or one tensor "
            f"of the batch is not "
            "indexed with the others.",
        )
    return "two orders"


def duplicates(subject: Subject) -> str:
    """Every example twice leaves a mean as it is and doubles a sum; so does one example twice."""
    _needs_fixed_randomness(subject)
    trial = subject.trial()
    n = len(trial.batch)
    before, twice = trial.number(), trial.number(trial.batch[[*range(n), *range(n)]])
    wanted = _declared_reduction(subject)
    fits = {kind: close(twice, factor * before) for kind, factor in (("mean", 1), ("sum", 2))}
    if wanted is not None and not fits[wanted]:
        raise PropertyError(
            f"The reduction is {wanted!r}, but with every example twice the value goes from {before:.8g} to "
            f"{twice:.8g} (factor "
            f"{_ratio(twice, before)}, expected {1 if wanted == 'mean' else 2}).\n{_COUPLED}"
        )
    if not any(fits.values()):
        raise PropertyError(
            f"With every example twice the value goes from {before:.8g} to {twice:.8g} (factor "
            f"{_ratio(twice, before)}); a mean keeps "
            f"it and a sum doubles it.\n{_COUPLED} An unbiased estimate (n - 1) does this on purpose: skip it by name."
        )
    found = wanted or ("mean" if fits["mean"] else "sum")
    if _is_additive(subject):
        one, two = trial.number(trial.batch[:1]), trial.number(trial.batch[[0, 0]])
        demand(
            close(two, one * (1 if found == "mean" else 2)),
            f"One example has the value {one:.8g}, the same one twice {two:.8g}; the {found} over examples should give "
            f"{one * (1 if found == 'mean' else 2):.8g}.\n{_COUPLED}",
        )
    return f"as a {found} over examples"


def chunk_size(subject: Subject) -> str:
    """Every `chunk_size` gives the same value and the same gradient."""
    trial = subject.trial()
    if not hasattr(trial.regularizer, "chunk_size"):
        raise NotApplicable("the regularizer has no attribute chunk_size")
    whole, gradients = trial.number(), trial.gradient()
    for size in (1, 2, len(trial.batch), None):
        other = copy.copy(trial)
        other.regularizer.chunk_size = size  # type: ignore[attr-defined]  # looked for above
        found = other.number()
        demand(close(found, whole), f"With chunk_size={size} the value is {found:.12g} instead of {whole:.12g}.")
        for name, gradient in other.gradient().items():
            expected = gradients[name]
            a = 0.0 if gradient is None else float(gradient.norm())
            b = 0.0 if expected is None else float(expected.norm())
            away = float((gradient - expected).norm()) if gradient is not None and expected is not None else abs(a - b)
            demand(
                away <= 1e-8 * max(a, b) + 1e-12,
                f"With chunk_size={size} the gradient of {name} differs by {away:.2e} (norm {b:.3g}).",
            )
    return "1, 2, n and None agree"


def _check_chunks(trial: Trial, total: float, reduction: str) -> None:
    n = len(trial.batch)
    parts = [(len(part), trial.number(part)) for part in trial.batch.chunks(2)]
    joined = math.fsum(size * part for size, part in parts) / n
    if reduction == "sum":
        joined = math.fsum(part for _, part in parts)
    demand(
        close(joined, total),
        f"Chunks of two examples give {joined:.12g} together, the whole batch {total:.12g}.\n{_COUPLED}",
    )


def _reduction(total: float, singles: list[float]) -> str | None:
    size = 1e-10 * max(abs(single) for single in singles)  # singles of both signs may cancel
    for kind, expected in (("mean", math.fsum(singles) / len(singles)), ("sum", math.fsum(singles))):
        if close(total, expected) or abs(total - expected) <= size:
            return kind
    return None


def _declared_reduction(subject: Subject) -> str | None:
    """Return the reduction over examples; that of a regularizer that is not additive may be one over groups or pairs."""
    if subject.reduction is not None or (subject.declared is not None and not subject.declared.additive):
        return subject.reduction
    found = getattr(subject.regularizer, "reduction", None)
    return found if found in ("mean", "sum") else None


def _is_additive(subject: Subject) -> bool:
    return bool(subject.additive if subject.declared is None else subject.declared.additive)


def _needs_fixed_randomness(subject: Subject) -> None:
    if subject.measured.get("random"):
        raise NotApplicable("random numbers are drawn, and other examples would get other ones")


def _power(total: float, mean: float, n: int) -> str:
    """Say by which power of n the value is off, if it is one."""
    for power in (-2, -1, 2):
        if close(total, mean * n**power):
            return f" That is the mean times n^{power}."
    return ""


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.4g}" if b else "undefined"
