"""Nothing lasting happens: to model, batch, random streams and the regularizer's own state, also when a call raises."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.errors import GradregWarning
from gradreg.model import call, walk
from gradreg.testing.checks._report import NotApplicable
from gradreg.testing.checks._trial import Subject, Trial, close, demand

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REMEDY = (
    "Usually: an in-place operation, requires_grad_() on the caller's tensor, .backward() instead of "
    "gradients, train() or eval() "
    "without a way back, or a hook that stays."
)


class _StopError(Exception):
    """Raised in the middle of a forward, to see what is left behind."""


def no_side_effects(subject: Subject) -> str:
    """Parameters, buffers, `.grad`, hooks, flags, random streams and the batch are as before, also when the call raises."""
    trial = subject.trial(None)
    allowed = _moved_by_forward(subject)
    _expect_same(_snapshot(trial), trial, allowed, lambda: _call(trial), "")
    interrupted = subject.trial(None)
    last = _last_called(interrupted)
    if last is None:
        return "no submodule is called, so that nothing could be interrupted"

    def stop(*_: Any) -> None:
        raise _StopError

    handle = last.register_forward_hook(stop)
    try:
        _expect_same(
            _snapshot(interrupted), interrupted, allowed, lambda: _interrupted(interrupted), " by a call that raised"
        )
    finally:
        handle.remove()
    return "also when the call raises"


def randomness(subject: Subject) -> str:
    """No random number is drawn, unless `seed` says that this is meant or the model itself draws some."""
    trial = subject.trial(None)
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        first = _call(trial)
        moved = not torch.equal(before, torch.get_rng_state())
        second = _call(trial)
    same = close(first, second, 1e-6)
    drawn = moved or not same
    subject.measured["random"] = drawn or subject.seed is not None
    if _model_draws(subject):
        subject.measured["random"] = True
        return "the model itself draws random numbers"
    demand(
        not drawn or subject.seed is not None,
        f"Random numbers are drawn ({'the random stream moved' if moved else 'two calls differ'}: values "
        f"{first:.8g} and {second:.8g})."
        "\nIf that is meant, pass seed=0: every evaluation then starts from it. Else use fixed directions, or put the model in "
        "eval mode.",
    )
    return f"fixed by seed={subject.seed}" if drawn else "none"


def state(subject: Subject) -> str:
    """A second call, also after one on other examples, gives the same value; state moves in `update` only."""
    trial = subject.trial()
    regularizer = trial.regularizer
    tables = _tensors(regularizer) if isinstance(regularizer, nn.Module) else {}
    kept = {name: tensor.detach().clone() for name, tensor in tables.items()}
    values = []
    others = trial.batch[[*range(len(trial.batch)), 0]]  # every group stays
    for batch in (trial.batch, others, trial.batch):
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", GradregWarning)
            torch.manual_seed(subject.seed or 0)
            model = subject.trial().model  # one of its own each time, so that only the regularizer can remember
            values.append(float(regularizer(model, batch).detach()))
    after = _tensors(regularizer) if isinstance(regularizer, nn.Module) else {}
    for name, before in kept.items():
        demand(
            name in after and torch.equal(after[name], before),
            f"{name!r} of the regularizer moved in forward (largest change "
            f"{float((after[name] - before).abs().max()) if name in after else float('nan'):.3g}).\nMove "
            f"state in update(model, batch): "
            "forward is called for evaluation too, and more than once per step.",
        )
    demand(
        close(values[0], values[2]),
        f"The same batch gave {values[0]:.10g} first and {values[2]:.10g} later (difference "
        f"{values[2] - values[0]:.2e}).\nUsually: "
        "something is remembered between calls (a moving average, a cache, a counter). Move it in update(model, batch) only.",
    )
    return "equal values, nothing moved"


def _call(trial: Trial) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradregWarning)
        return float(trial.regularizer(trial.model, trial.batch).detach())


def _interrupted(trial: Trial) -> None:
    try:
        _call(trial)
    except _StopError:
        return
    except Exception as problem:  # wrapped: all that matters is what is left behind
        if isinstance(problem.__cause__ or problem.__context__, _StopError):
            return
        raise


def _expect_same(before: dict[str, Any], trial: Trial, allowed: set[str], run: Any, when: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed or 0)
        random = torch.get_rng_state()
        run()
        moved = not torch.equal(random, torch.get_rng_state())
    after = _snapshot(trial)
    changed = sorted(name for name in before.keys() | after.keys() if not _equal(before.get(name), after.get(name)))
    changed = [name for name in changed if name not in allowed]
    if changed:
        rest = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        demand(False, f"Changed{when}: {', '.join(changed[:3])}{rest}.\n{_REMEDY}")
    demand(
        not moved or trial.seed is not None or "random" in allowed,
        f"The random stream was moved{when}, though the model alone leaves it alone; see `randomness`.",
    )


def _snapshot(trial: Trial) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in walk(trial.model):
        label = f"module {name!r}" if name else "the model"
        found[f"the train flag of {label}"] = module.training
        for hooks in _HOOKS:
            found[f"{hooks.strip('_').replace('_', ' ')} of {label}"] = tuple(getattr(module, hooks))
        for key in vars(module):
            found[f"the attribute {key!r} of {label}"] = True
    for name, parameter in trial.model.named_parameters():
        found[f"parameter {name!r}"] = (id(parameter), parameter.detach().clone())
        found[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
        found[f"{name}.requires_grad"] = parameter.requires_grad
    for name, buffer in trial.model.named_buffers():
        found[f"buffer {name!r}"] = buffer.detach().clone()
    for name, tensor in _batch_tensors(trial):
        found[f"the batch's {name}"] = tensor.detach().clone()
        found[f"requires_grad of the batch's {name}"] = tensor.requires_grad
        if tensor.is_leaf and tensor.grad is not None:
            found[f".grad of the batch's {name}"] = tensor.grad.clone()
    return found


def _batch_tensors(trial: Trial) -> Iterator[tuple[str, Tensor]]:
    tensors: list[Tensor] = []
    trial.batch.map(lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]  # collects
    names = [name for name, value in trial.batch.named_inputs().items() if isinstance(value, Tensor)]
    for position, tensor in enumerate(tensors):
        yield (f"input {names[position]!r}" if position < len(names) else f"tensor {position}"), tensor


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    return type(a) is type(b) and bool(a == b)


def _moved_by_forward(subject: Subject) -> set[str]:
    """Return what a forward of the model alone moves: that much is the model's own doing."""
    trial = subject.trial(None)
    before = _snapshot(trial)
    with torch.random.fork_rng(devices=[]):
        random = torch.get_rng_state()
        call(trial.model, trial.batch)
        moved = {"random"} if not torch.equal(random, torch.get_rng_state()) else set()
    after = _snapshot(trial)
    kinds = ("buffer ", "the attribute ")
    changed = {name for name in before.keys() | after.keys() if not _equal(before.get(name), after.get(name))}
    return moved | {name for name in changed if name.startswith(kinds)}


def _model_draws(subject: Subject) -> bool:
    return "random" in _moved_by_forward(subject)


def _last_called(trial: Trial) -> nn.Module | None:
    """Return the leaf module that a forward of the model calls last."""
    order: list[nn.Module] = []
    leaves = [module for _, module in walk(trial.model) if not module._modules]
    handles = [leaf.register_forward_hook(lambda module, *_: order.append(module)) for leaf in leaves]
    try:
        trial.forward()
    except Exception as problem:
        raise NotApplicable(f"the model alone cannot be run on this batch ({problem})") from problem
    finally:
        for handle in handles:
            handle.remove()
    return order[-1] if order else None


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
