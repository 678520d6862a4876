"""Models on which gradient code goes wrong, each with a small batch, a scalar and variables to differentiate by.

Everything is seeded and tiny, in float64 where the tags say nothing else, and smooth, so that second derivatives exist
and differ from zero. Loop over `CASES`, or pick by name with `case(name)`, or by tag with `cases_with(tag)`; `print(table())`
says what every one is there for.

Run code of your own on all of them, against `gradreg.testing.reference`::

    @pytest.mark.parametrize("case", zoo.CASES, ids=lambda case: case.name)
    def test_mine(case):
        model, batch = case.make_model(), case.make_batch()
        for wrt in case.wrts.values():
            assert_same(mine(model, batch, case.of, wrt), reference.gradients(model, batch, case.of, wrt))

Add an awkward model of your own with `make_case`, and see with `check_case` whether gradreg gets it right. If not, it is a bug
of gradreg: such a case is the best report of it.

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

from torch import Tensor

from gradreg.engine import gradients
from gradreg.errors import UnknownNameError, closest
from gradreg.testing import reference
from gradreg.testing._case import Case as Case
from gradreg.testing._case import Data as Data
from gradreg.testing._case import make_case as make_case
from gradreg.testing._head_cases import HEAD_CASES
from gradreg.testing._plain_cases import PLAIN_CASES
from gradreg.testing.compare import assert_same

__all__ = ["CASES", "Case", "Data", "case", "cases_with", "check_case", "make_case", "table"]

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


def table() -> str:
    """Return a line per case: its name, and what it is there for.

    Example:
        >>> from gradreg.testing import zoo
        >>> print(zoo.table().splitlines()[1])
        reused_module              one module called three times; its calls are apart as activations and summed as parameters
    """
    width = max(len(item.name) for item in CASES)
    return "\n".join(f"{item.name:<{width}}  {item.what}" for item in CASES)


def check_case(item: Case, *, second: bool = True) -> None:
    """Demand that `gradreg.gradients` equals the naive loop on a case, and so the derivatives of what it returns.

    Args:
        item: The case; of a model that draws no random numbers.
        second: Whether the gradient of a random functional of the gradients is compared too.

    Raises:
        AssertionError: If they differ; the worst entry of every key is named.

    Example:
        >>> from gradreg.testing import zoo
        >>> zoo.check_case(zoo.case("tied_weights"))
    """
    for name, wrt in item.wrts.items():
        model, batch = item.make_model(), item.make_batch()
        found = gradients(model, batch, item.of, wrt)
        _same(f"{item.name}, {name}", found, reference.gradients(model, batch, item.of, wrt))
        if second:
            truth = reference.second_derivative(model, batch, item.of, wrt)
            again = reference.second_derivative(model, batch, item.of, wrt, gradients=gradients)
            _same(f"{item.name}, {name}, differentiated again", again, truth)


def _same(what: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    try:
        assert_same(found, expected)
    except AssertionError as problem:
        raise AssertionError(f"{what}: {problem}") from problem
