"""Models on which gradient code goes wrong, each with a small batch, a scalar and variables to differentiate by.

Everything is seeded and tiny, in float64 where the tags say nothing else, and smooth, so that second derivatives exist
and differ from zero. Loop over `CASES`, or pick by name with `case(name)`, or by tag with `cases_with(tag)`.

Tags:
    `heads`: a `SharedBase` or an `Ensemble`.
    `attention`: contains an attention kernel without a double backward of its own.
    `recurrent`: contains an RNN.
    `no_vmap`: torch.func.vmap over examples cannot run the model; per-example parameters need the loop.
    `random`: draws random numbers, so two forwards cannot be compared.
    `batch_statistics`: a BatchNorm in train mode, upstream of everything in `wrts`.
    `writes_buffers`: the forward changes a buffer.
    `float32`, `bfloat16`: the dtype.
    `large`: dear for the reference.
"""

from __future__ import annotations

from gradreg.errors import UnknownNameError, closest
from gradreg.testing._case import Case as Case
from gradreg.testing._head_cases import HEAD_CASES
from gradreg.testing._plain_cases import PLAIN_CASES

__all__ = ["CASES", "Case", "case", "cases_with"]

CASES: tuple[Case, ...] = (*PLAIN_CASES, *HEAD_CASES)


def case(name: str) -> Case:
    """Return the case of this name.

    Raises:
        UnknownNameError: If there is none.

    Example:
        >>> from gradreg.testing import zoo
        >>> zoo.case("reused_module").name
        'reused_module'
    """
    found = {item.name: item for item in CASES}
    if name not in found:
        raise UnknownNameError(f"The zoo has no case {name!r}; the closest are {closest(name, found)}.")
    return found[name]


def cases_with(tag: str) -> tuple[Case, ...]:
    """Return the cases that carry a tag.

    Example:
        >>> from gradreg.testing import zoo
        >>> all("heads" in item.tags for item in zoo.cases_with("heads"))
        True
    """
    return tuple(item for item in CASES if tag in item.tags)
