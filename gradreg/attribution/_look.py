"""An attribution as text, and the parts of it that are shown."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gradreg.attribution._check import EXAMPLE, number, per_example
from gradreg.attribution._fields import Fields
from gradreg.errors import GradregError

__all__ = [
    "Score",
    "as_lines",
    "as_text",
    "chosen",
    "is_real",
    "one_axis",
    "shown_labels",
    "target_name",
    "target_names",
    "top",
]

TOKEN = "token"
"""The axis of targets of which there is one for every token."""

_MOST_LINES, _MOST_TOKENS = 12, 6


class Score(NamedTuple):
    """The score of one source.

    Args:
        key: Result key.
        position: Along the last axis.
        label: The token, or the position as text.
        score: In units of the target.
    """

    key: str
    position: int
    label: str
    score: float


def as_text(a: Fields) -> str:
    """Return one line: what was attributed to what, and how well it sums up."""
    first = next(iter(a.by_key.values()))
    sizes = [f"{size} {axis}" for axis, size in zip(a.target_axes, first.shape[1:], strict=False)]
    start = 1 + len(a.target_axes)
    keys = [f"{key!r} {list(value.shape[start:])}" for key, value in a.by_key.items()]
    n = first.shape[0]
    parts = [f"{n} example" + ("s" if n != 1 else ""), *([" x ".join(sizes)] if sizes else []), ", ".join(keys)]
    text = f"Attribution by {a.method} per {a.per}: {', '.join(parts)}"
    if a.delta is not None and a.delta.numel():
        text += f"; largest |delta| {float(a.delta.detach().abs().max()):.2g}"
    if a.error is not None and a.error.numel():
        text += f", largest estimated error {float(a.error.detach().max()):.2g}"
    return text


def as_lines(a: Fields) -> list[str]:
    """Return a line per example and target with its largest scores, up to a dozen."""
    first = next(iter(a.by_key.values()))
    start = 1 + len(a.target_axes)
    if any(value.dim() > start + 1 for value in a.by_key.values()):
        return []
    shape = first.shape[:start]
    lines = []
    for place in itertools.islice(itertools.product(*map(range, shape)), _MOST_LINES):
        example, target = place[0], place[1:]
        best = top(a, _MOST_TOKENS, example, target)
        named = [f"{EXAMPLE} {example}", *(target_name(a, n, one, example) for n, one in enumerate(target))]
        lines.append(f"  {', '.join(named)}: " + ", ".join(f"{one.label!r} {one.score:+.3g}" for one in best))
    rest = shape.numel() - len(lines)
    return lines + ([f"  ... and {rest} more"] if rest > 0 else [])


def target_names(a: Fields, axis: int, example: int) -> list[str | None]:
    """Return a name for every target along an axis, empty where none is known, and None for targets that are padding.

    Targets of the axis `"token"` are named by their tokens. Of an encoder-decoder the outputs are those of the decoder,
    whose key comes last.
    """
    name = a.target_axes[axis]
    size = next(iter(a.by_key.values())).shape[1 + axis]
    if name in a.target_labels:
        own = a.target_labels[name]
        return list(own[example]) if per_example(own) else [str(one) for one in own]
    keys = [key for key, value in a.by_key.items() if value.shape[1 + len(a.target_axes)] == size]
    if name != TOKEN or a.per != TOKEN or not keys or a.provenance.get("sources") == "words":
        return [""] * size
    key = keys[-1]
    labels = shown_labels(a, key, example) if key in {*a.labels, *a.ids} else [""] * size
    return [label if is_real(a, key, example, place) else None for place, label in enumerate(labels)]


def is_real(a: Fields, key: str, example: int, position: int) -> bool:
    """Tell whether a position is no padding."""
    return key not in a.valid or bool(a.valid[key][example, position])


def target_name(a: Fields, axis: int, place: int, example: int) -> str:
    """Return a target's name along one axis, such as `class 2 (B-PER)`."""
    own = target_names(a, axis, example)[place]
    return f"{a.target_axes[axis]} {place}" + (f" ({own.strip() or repr(own)})" if own else "")


def one_axis(a: Fields) -> None:
    """Refuse scores whose sources have more than one axis, for these cannot be listed.

    Raises:
        GradregError: Says how to get there.
    """
    start = 1 + len(a.target_axes)
    for key, scores in a.by_key.items():
        if scores.dim() > start + 1:
            raise GradregError(
                f"The scores of {key!r} are per feature, with the shape {list(scores.shape[start:])} for each target; only "
                "one axis can be shown. Ask for per='token', or sum over the others with dataclasses.replace; of pictures, "
                "draw `scores` with matplotlib's imshow."
            )


def shown_labels(a: Fields, key: str, example: int) -> list[str]:
    """Return a label for every position: the token, else its id, else its number."""
    if key in a.labels:
        return list(a.labels[key][example])
    if key in a.ids:
        return [f"id {one}" for one in a.ids[key][example].tolist()]
    return [str(place) for place in range(a.by_key[key].shape[1 + len(a.target_axes)])]


def named(a: Fields, example: int, target: int | Sequence[int]) -> str:
    """Return the name of a target along all axes; see `Attribution.target_name`."""
    first, *numbers = _place(a, example, target)
    return ", ".join(target_name(a, axis, one, first) for axis, one in enumerate(numbers))


def chosen(a: Fields, example: int, target: int | Sequence[int]) -> list[tuple[str, Tensor, list[str]]]:
    """Return key, scores `[L]` and labels of one example and target.

    Raises:
        GradregError: If there is none such.
    """
    one_axis(a)
    place = _place(a, example, target)
    return [(key, scores[place].detach(), shown_labels(a, key, place[0])) for key, scores in a.by_key.items()]


def _place(a: Fields, example: int, target: int | Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of an example and a target, after checking them."""
    given = [target] if isinstance(target, int) else list(target)
    first = next(iter(a.by_key.values()))
    axes = (EXAMPLE, *a.target_axes)
    if len(given) != len(a.target_axes):
        names = ", ".join(a.target_axes) or "none"
        raise GradregError(
            f"target={target!r} has {len(given)} numbers; the axes of targets are {len(a.target_axes)} ({names})."
        )
    return tuple(number(one, size, axis) for one, size, axis in zip([example, *given], first.shape, axes, strict=False))


def top(a: Fields, k: int, example: int, target: int | Sequence[int]) -> list[Score]:
    """Return the sources with the largest scores in absolute value; see `Attribution.top`."""
    found = [
        Score(key, place, label, float(score))
        for key, scores, labels in chosen(a, example, target)
        for place, (score, label) in enumerate(zip(scores.tolist(), labels, strict=True))
        if is_real(a, key, example, place)
    ]
    # what is no number comes first, for it must not be overlooked
    return sorted(found, key=lambda one: (one.score == one.score, -abs(one.score)))[: max(k, 0)]
