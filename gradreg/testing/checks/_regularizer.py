"""One call that checks a regularizer, or any penalty of your own."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.errors import GradregError, GradregWarning, closest, warn
from gradreg.model import devices_of, preserved_random_state
from gradreg.testing.checks import _declarations, _derivatives, _effects, _numerics, _values
from gradreg.testing.checks._report import CheckFailure, Finding, NotApplicable, PropertyError, RegularizerReport
from gradreg.testing.checks._trial import Penalty, Subject, demand, read_batch


def runs(subject: Subject) -> str:
    """It gives a finite scalar that can be trained on."""
    trial = subject.trial()
    if hasattr(trial.regularizer, "_first_call"):
        trial.regularizer._first_call = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = trial.regularizer(trial.model, trial.batch)
    subject.measured["warnings"] = [
        (str(item.message), item.category) for item in caught if issubclass(item.category, GradregWarning)
    ]
    demand(isinstance(value, Tensor) and value.dim() == 0, f"It must return a scalar tensor, found {_shape(value)}.")
    number = float(value.detach())
    demand(abs(number) < float("inf"), f"The value is {number}.")  # also false for NaN
    if trial.variables():
        demand(
            value.requires_grad,
            "The value carries no graph, so that adding it to a loss changes nothing.\nUsually: a detach(), "
            "a gradient taken without "
            "differentiable=True (create_graph=True), or a NumPy detour. A linear model also does this: its "
            "gradient is a constant.",
        )
    return f"{number:.6g}"


PROPERTIES: dict[str, Callable[[Subject], str]] = {
    "runs": runs,
    "randomness": _effects.randomness,
    "value": _values.value,
    "additive": _values.additive,
    "permutation": _values.permutation,
    "duplicates": _values.duplicates,
    "chunk_size": _values.chunk_size,
    "first_derivative": _derivatives.first_derivative,
    "second_derivative": _derivatives.second_derivative,
    "gradgradcheck": _derivatives.torch_gradgradcheck,
    "no_side_effects": _effects.no_side_effects,
    "state": _effects.state,
    "shared_forward": _declarations.shared_forward,
    "single_example": _numerics.single_example,
    "zero_gradients": _numerics.zero_gradients,
    "float32": _numerics.float32,
    "bfloat16": _numerics.bfloat16,
    "needs_targets": _declarations.needs_targets,
    "order": _declarations.order,
}
REGULARIZER_PROPERTIES = tuple(PROPERTIES)
_FIRST = ("runs", "randomness")  # the others build on them


def check_regularizer(
    reg: Penalty,
    model: nn.Module,
    batch: Any,
    *,
    reference: Penalty | None = None,
    reduction: str | None = None,
    additive: bool | None = None,
    seed: int | None = None,
    skip: Mapping[str, str] | None = None,
    only: Sequence[str] | None = None,
) -> RegularizerReport:
    """Check all that should hold for a penalty on gradients, on copies in float64; raise with every property that does not.

    Give a small model (tens of parameters) and three to eight examples; the cost is that of some hundred values of the penalty.
    Model, batch and regularizer are left untouched.

    ==================== ==================================================================================================
    runs                 a finite scalar with a graph
    randomness           no random number is drawn, unless `seed` is given or the model itself draws some
    value                equals `reference`
    additive             mean or sum of the values of single examples, also in chunks, exactly where declared
    permutation          the order of the examples does not matter
    duplicates           every example twice keeps a mean and doubles a sum
    chunk_size           every chunk size gives the same, where the regularizer has one
    first_derivative     gradient by parameters, and inputs that require grad, against finite differences; kinks are retried
    second_derivative    gradient of the gradient along a random direction against finite differences
    gradgradcheck        torch's own check, fast mode
    no_side_effects      parameters, buffers, `.grad`, hooks, flags, random streams, batch; also when the call raises
    state                a second call gives the same value; state moves in `update` only
    shared_forward       the same value inside an `Objective`, next to a second one
    single_example       finite, or a `GradregError`
    zero_gradients       finite value and gradients where all weights are zero
    float32, bfloat16    close to float64; finite
    needs_targets        as declared
    order                as declared
    ==================== ==================================================================================================

    Args:
        reg: A `Regularizer`, or any callable `(model, batch) -> scalar`.
        model: A model that suits it. With a smooth model no kink has to be retried.
        batch: Whatever `gradreg.as_batch` reads, two examples or more.
        reference: The same value in the plainest way, `(model, batch) -> scalar`.
        reduction: `"mean"` or `"sum"` over examples; read from `reg.reduction` where that says so, else found out.
        additive: For a plain callable, whether it is a mean or sum over examples; a `Regularizer` declares it itself.
        seed: For a penalty that draws random numbers: every evaluation starts from this seed.
        skip: From property to the reason why it is left out.
        only: The properties to look at; all by default. For `@pytest.mark.parametrize("name", REGULARIZER_PROPERTIES)`.

    Returns:
        A report; `str(report)` is a table of what was checked.

    Raises:
        CheckFailure: An `AssertionError` that says which properties failed, by how much, where, and what it usually means.
        GradregError: If a property is unknown, a reason is missing, or the batch is too small.

    Example:
        >>> import torch, gradreg as gr
        >>> from torch import nn
        >>> from gradreg.testing import check_regularizer
        >>> def input_gradient(model, batch):
        ...     g = gr.gradients(model, batch, gr.logit(0), gr.Inputs(), differentiable=True)["inputs"]
        ...     return g.square().sum(1).mean()
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> report = check_regularizer(input_gradient, net, torch.randn(4, 3), additive=True)
        >>> report.ok, report["additive"].detail
        (True, 'the mean over examples')
    """
    skip = dict(skip or {})
    for name in (*skip, *(only or ())):
        if name not in PROPERTIES:
            raise GradregError(f"There is no property {name!r}; the closest are {closest(name, PROPERTIES)}.")
    for name, reason in skip.items():
        if not isinstance(reason, str) or not reason.strip():
            raise GradregError(f'skip[{name!r}] needs a reason: skip={{"{name}": "why"}}.')
    if reduction not in (None, "mean", "sum"):
        raise GradregError(f"reduction={reduction!r}; allowed are 'mean', 'sum' and None.")
    subject = Subject(reg, model, read_batch(batch), reference, reduction, additive, seed)
    with preserved_random_state(devices_of(model)), torch.enable_grad():
        torch.manual_seed(0)  # the same directions every time
        findings = tuple(_all_findings(subject, skip, PROPERTIES if only is None else only))
    heard = subject.measured.get("warnings", [])
    report = RegularizerReport(_name(reg), findings, tuple(text for text, _ in heard))
    if not report.ok:
        raise CheckFailure(report)
    for text, category in heard:
        warn(text, category)
    return report


def _all_findings(subject: Subject, skip: Mapping[str, str], wanted: Container[str]) -> Iterator[Finding]:
    for name, check in PROPERTIES.items():
        if name in skip:
            yield Finding(name, "skipped", skip[name])
        elif name in wanted or name in _FIRST:
            finding = _looked_at(name, check, subject)
            ends = name == "runs" and finding.status == "failed"
            if name in wanted or ends:
                yield finding
            if ends:
                return


def _looked_at(name: str, check: Callable[[Subject], str], subject: Subject) -> Finding:
    try:
        return Finding(name, "passed", check(subject))
    except NotApplicable as reason:
        return Finding(name, "not applicable", str(reason))
    except PropertyError as problem:
        return Finding(name, "failed", str(problem))
    except Exception as problem:  # a fault of the penalty: it belongs to the property that met it
        place = traceback.extract_tb(problem.__traceback__)[-1]
        return Finding(
            name,
            "failed",
            f"It raises {type(problem).__name__}: {problem}\nin {place.name}, {place.filename}:{place.lineno}",
        )


def _name(reg: Penalty) -> str:
    return type(reg).__name__ if isinstance(reg, nn.Module) else getattr(reg, "__name__", type(reg).__name__)


def _shape(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
