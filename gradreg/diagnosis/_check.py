"""check_double_backward: can this penalty be differentiated again, who hears nothing of it, and why?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gradreg.batch import as_batch
from gradreg.diagnosis._causes import blockers, classed, inside, merged, on_paths, raising, wrong
from gradreg.diagnosis._measure import Measurement, measure, silent_paths
from gradreg.diagnosis._penalty import Penalty, as_penalty
from gradreg.diagnosis._remedies import FREEZE, remedy, remedy_of_error
from gradreg.diagnosis._report import TINY, UNSUPPORTED, WRONG, Cause, DoubleBackwardReport, ParameterReport
from gradreg.diagnosis._structure import wrapper_causes
from gradreg.diagnosis._trial import Trial
from gradreg.engine import RAISES, Record
from gradreg.errors import CompatibilityError, GradregError
from gradreg.model import unwrap


def check_double_backward(model: nn.Module, batch: Any, regularizer: Any) -> DoubleBackwardReport:
    r"""Measure what a penalty sends to every parameter, $\partial R / \partial \theta$, and find what is in the way.

    Everything is measured on this batch, in float64 on copies of parameters, buffers and batch: exact zeros and missing
    gradients, and disagreement with finite differences of $R$ along random directions. Operations between `wrt` and `of` are
    classed by their own second derivative at the inputs that they see. Model, regularizer, batch, `.grad`, hooks, modes and
    random streams are left as they were, also when something raises.

    A parameter that mathematically gets nothing is `expected zero` and fine: the biases of a ReLU network under a penalty on
    input gradients. A whole part in front of `wrt` that gets nothing (the base of a `SharedBase` with ReLU heads) is `zero` or
    `disconnected` and blocked: the penalty does not depend on it either, but it was meant to.

    Args:
        model: The model as it is trained; a DistributedDataParallel wrapper is looked through without communication.
        batch: A `Batch`, or what `as_batch` reads. A few examples are enough.
        regularizer: A regularizer; a function `(model, batch) -> scalar`, which gets the batch as it is given here; or a
            pair `(of, wrt)`, which stands for the squares of these gradients and, with heads, their products.

    Returns:
        The report: `ok`, `parameters`, `causes`, `str(report)`, `raise_if_blocked()`, `to_dict()`.

    Raises:
        GradregError: If the regularizer is none of these, or returns no real scalar.
        CompatibilityError: If no parameter requires grad.

    Example:
        >>> import torch, gradreg as gr
        >>> from torch import nn
        >>> heads = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
        >>> model = gr.SharedBase(nn.Linear(6, 4), heads)
        >>> report = gr.check_double_backward(model, torch.randn(5, 6), gr.regularizers.DiverseHeads())
        >>> report.ok, report.parameters["base.weight"].status, [cause.name for cause in report.causes]
        (False, 'zero', ['heads.0.1', 'heads.1.1'])
    """
    if not isinstance(model, nn.Module):
        raise CompatibilityError(f"model is a {type(model).__name__}; check_double_backward needs a torch.nn.Module.")
    penalty, inner, examples = as_penalty(regularizer), unwrap(model), len(as_batch(batch))
    if not any(parameter.requires_grad for parameter in inner.parameters()):
        raise CompatibilityError(
            f"No parameter of the {type(inner).__name__} requires grad: there is nothing that could hear of the penalty."
        )
    structural = wrapper_causes(model)
    if structural:
        return _refused(penalty, inner, examples, structural)
    trial, found = _measured(model, batch, penalty)
    causes = _causes(trial, found)
    dtype = "float64" if trial.dtype is not None else "own precision"
    notes = dict.fromkeys([*_notes(model, trial, found), *trial.notes])
    return DoubleBackwardReport(
        penalty.name, type(inner).__name__, examples, dtype, found.value, found.parameters, tuple(causes), tuple(notes)
    )


def _measured(model: nn.Module, batch: Any, penalty: Penalty) -> tuple[Trial, Measurement]:
    """Measure in float64, and where that raises, in the model's own precision."""
    resolution = max(
        (torch.finfo(p.dtype).eps for p in model.parameters() if p.requires_grad and p.is_floating_point()),
        default=1e-7,
    )
    trial = Trial(model, batch, penalty, torch.float64)
    found = measure(trial, double=True, resolution=resolution)
    if isinstance(found.error, (AttributeError, TypeError, IndexError)) and penalty.given:
        # a function that wants a Batch where a tensor or a pair was given
        other = Trial(model, batch, replace(penalty, given=False), torch.float64)
        again = measure(other, double=True, resolution=resolution)
        if again.error is None:
            return other, again
    if found.error is None:
        return trial, found
    own = Trial(model, batch, penalty, None)
    second = measure(own, double=False, resolution=resolution)
    if second.error is None:
        own.notes.append(f"float64 was not possible ({found.error}); measured in the model's own precision.")
        return own, second
    if _is_misuse(second.error):
        raise second.error
    return (trial, found) if str(found.error) == str(second.error) else (own, second)


def _is_misuse(error: Exception) -> bool:
    """Whether the call itself is wrong, not the model: unknown names, missing targets."""
    return isinstance(error, GradregError) and not isinstance(error, CompatibilityError)


def _causes(trial: Trial, found: Measurement) -> list[Cause]:
    """Find whole parts that hear nothing, and name what is in the way of them and of all else that is blocked."""
    doubtful = [
        report for report in found.parameters.values() if report.blocked or report.status not in ("ok", "partly_zero")
    ]
    if not doubtful:
        return []
    with trial.observed() as (record, names):
        if found.error is not None:
            return _raised(record, found.error)
        silent = silent_paths(found, record, names)
        if not any(report.blocked for report in found.parameters.values()):
            return []
        causes: list[Cause] = []
        if found.moved or any(report.status == WRONG for report in found.parameters.values()):
            causes += _wrong(record, found)
        if not causes and silent:
            tiny = any(report.status == TINY for report in found.parameters.values())
            causes += blockers(classed(inside(on_paths(record, silent))), also_curved=tiny)
            if found.value == 0:  # flat functions make it so, and so does a hinge that is not active
                causes.append(
                    Cause("", "penalty", "cut", "look at a batch on which it is active.", text="it is 0 on this batch")
                )
        return merged(causes) or _detached(record, found)


def _raised(record: Record, error: Exception) -> list[Cause]:
    paths = [path for path in record.gradients if path.keeps_graph]
    calls = on_paths(record, paths) if paths else [(call, []) for call in record.calls]
    causes = [] if isinstance(error, GradregError) else raising(classed(calls))
    if causes:
        return causes
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if record.raised is not None and not isinstance(error, GradregError):
        call = record.raised
        return [Cause(call.name, call.kind, RAISES, remedy(RAISES, call.kind, text), text=text)]
    return [Cause("", type(error).__name__, RAISES, remedy_of_error(str(error)), text=text)]


def _wrong(record: Record, found: Measurement) -> list[Cause]:
    """Name operations whose own derivatives are wrong: the second ones first, then the third."""
    calls = on_paths(record, [path for path in record.gradients if path.keeps_graph])
    custom = [(call, active) for call, active in calls if call.function is not None]
    for chosen, order in ((custom, 2), (calls, 2), (calls, 3)):
        causes = wrong(classed(chosen, verify=order)) if chosen else []
        if causes:
            return causes
    return _detached(record, found)


def _detached(record: Record, found: Measurement) -> list[Cause]:
    kept = [path for path in record.gradients if path.keeps_graph]
    if not found.connected:
        what, advice = "the penalty carries no graph", "do not detach it or what it is made of; no no_grad() around it."
        if record.gradients and not kept:
            what = "gradients were taken without a graph of their own"
            advice = "take them with create_graph=True, or gradreg.gradients(..., differentiable=True)."
        return [Cause("", "penalty", "cut", advice, text=what)]
    if found.moved and kept and not any(path.upstream for path in kept):
        return [
            Cause(
                "",
                "wrt",
                "cut",
                "keep the tensor attached to what computed it: no detach() before the gradient, and live parameters (no "
                "detached copies or stack_module_state) in functional calls.",
                text="gradients are taken with respect to a new leaf, which nothing before it can hear through",
            )
        ]
    if found.moved:
        return [
            Cause(
                "",
                "path",
                "cut",
                "look for detach(), .data, no_grad() or detached copies of parameters (functional_call, stack_module_state).",
                text=f"the penalty depends on {', '.join(found.moved[:3])}, but its graph does not",
            )
        ]
    return []


def _notes(model: nn.Module, trial: Trial, found: Measurement) -> list[str]:
    notes = []
    if any(
        report.blocked and report.status in ("zero", "disconnected", "tiny") for report in found.parameters.values()
    ):
        notes.append(FREEZE)
    if model is not trial.inner and not trial.through_wrapper and found.error is None:
        notes.append(
            f"The penalty bypasses the {type(model).__name__}: its gradients are averaged over processes only if the task loss "
            "goes through the wrapper and both are backpropagated by one backward()."
        )
    return notes


def _refused(penalty: Penalty, inner: nn.Module, examples: int, causes: list[Cause]) -> DoubleBackwardReport:
    text = "; ".join(str(cause) for cause in causes)
    reports = {
        name: ParameterReport(UNSUPPORTED, True, text=text)
        for name, parameter in inner.named_parameters()
        if parameter.requires_grad
    }
    return DoubleBackwardReport(penalty.name, type(inner).__name__, examples, "not run", None, reports, tuple(causes))
