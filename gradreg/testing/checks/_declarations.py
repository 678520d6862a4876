"""What a regularizer says of itself is true: order, targets, and what it takes from the shared forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradreg.errors import GradregError
from gradreg.model import walk
from gradreg.objective import Objective
from gradreg.regularizers import Regularizer
from gradreg.schedules import Constant
from gradreg.testing.checks._report import NotApplicable, PropertyError
from gradreg.testing.checks._trial import Subject, close, demand


def needs_targets(subject: Subject) -> str:
    """Without targets there is a `GradregError` where they are declared to be needed, else the same value."""
    trial = subject.trial()
    if trial.batch.targets is None:
        raise NotApplicable("the batch has no targets")
    before, without = trial.number(), replace(trial.batch, targets=None)
    declared = subject.declared.needs_targets if subject.declared is not None else None
    try:
        after = trial.number(without)
    except GradregError as refusal:
        return "needed, and asked for" if declared is not False else f"asked for by what it is made of: {refusal}"
    except Exception as problem:
        text = str(problem).splitlines()[0] if str(problem) else ""
        if declared is None:
            return f"needed ({type(problem).__name__})"
        raise PropertyError(
            f"Without targets it raises {type(problem).__name__}: {text}\nDeclare needs_targets = True; the "
            f"error is then a clear one."
        ) from problem
    demand(declared is not True, "Declared needs_targets=True, but without targets there is no error.")
    demand(
        close(before, after),
        f"Without targets the value is {after:.8g} instead of {before:.8g}: targets are read.\nDeclare needs_targets = True.",
    )
    return "not needed"


def order(subject: Subject) -> str:
    """A training step takes as many derivatives as declared; measured by identities that count how often they are passed."""
    trial = subject.trial()
    reached = [0]
    leaves = [module for _, module in walk(trial.model) if not module._modules]
    probes = [leaf.register_forward_hook(lambda _, __, output: _probed(output, reached)) for leaf in leaves]
    try:
        trial.gradient()
    except Exception as problem:
        raise NotApplicable(f"it does not run with hooks on its modules ({type(problem).__name__})") from problem
    finally:
        for probe in probes:
            probe.remove()
    through = f"{reached[0]} through the model's modules"
    if subject.declared is None:
        return through
    wanted = subject.declared.order
    demand(
        reached[0] == wanted
        or reached[0] < wanted <= 2,  # fewer, where no module lies behind what is differentiated by
        f"Declared order={wanted}, but a training step takes derivatives of order {reached[0]}: the penalty holds "
        f"{('no', 'first', 'second', 'third')[min(max(reached[0] - 1, 0), 3)]} derivatives, and one more is taken of it.",
    )
    return f"{wanted}, {through}"


def shared_forward(subject: Subject) -> str:
    """Inside an `Objective`, next to another one that reads the same gradients, the value is the same."""
    if subject.declared is None:
        raise NotApplicable("a plain function; Objective takes regularizers")
    if subject.measured.get("random"):
        raise NotApplicable("random numbers are drawn")
    trial, other = subject.trial(), subject.trial()
    alone = trial.number()
    assert isinstance(trial.regularizer, Regularizer)
    assert isinstance(other.regularizer, Regularizer)
    for regularizer in (trial.regularizer, other.regularizer):
        regularizer.weight = Constant(1.0)  # a schedule might leave it out at the first step
    objective = Objective(None, first=trial.regularizer, second=other.regularizer)
    objective.eval()
    modes = [(module, module.training) for module in trial.regularizer.modules()]
    with trial.undisturbed():
        try:
            _, logs = objective(trial.model, trial.batch)
        finally:
            for module, mode in modes:
                module.training = mode
    for name in ("first", "second"):
        found = float(logs[name])
        demand(
            close(alone, found),
            f"Alone the value is {alone:.10g}, in an Objective it is {found:.10g} for the {name} of two.\n"
            f"Usually: gradients of the shared "
            "forward are changed in place, or shares() names another (of, wrt) than forward asks for.",
        )
    return "the same in an Objective"


def _probed(output: Any, reached: list[int]) -> Any:
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda t: _Probe.apply(t, reached, 0) if t.is_floating_point() else t, output
    )


class _Probe(torch.autograd.Function):
    """The identity, at a level of differentiation; its backward notes the level above and is again an identity there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, reached: list[int], level: int) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.reached, ctx.level = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.reached[0] = max(ctx.reached[0], ctx.level + 1)
        passed: Tensor = _Probe.apply(gradient, ctx.reached, ctx.level + 1)
        return passed, None, None
