"""Objective: a task loss and weighted regularizers over one shared forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch, as_batch
from gradreg.engine import Session, grad_mode, map_heads, open_session
from gradreg.errors import CompatibilityError, GradregError, NonFiniteLossError, ScalarError
from gradreg.model import any_trainable, unwrap
from gradreg.regularizers import Regularizer
from gradreg.scalars import check_labels, is_causal_language_model, paired, read_outputs
from gradreg.schedules import weight_at

__all__ = ["Objective"]


class Objective(nn.Module):
    r"""Task loss plus weighted regularizers, $L = \frac1K \sum_k \mathrm{task}_k + \sum_r w_r(\mathrm{step})\, R_r$.

    One forward of the model per call: the task and all regularizers of features, inputs and activations read the same
    captured outputs. The task keeps its own reduction; with heads it is taken per head, then averaged. In training mode the
    step is counted and regularizers move their state; under `objective.eval()` neither happens. A regularizer whose weight
    is 0 at a step is not computed: `gr.schedules.Every(16, 10.0)` applies one lazily, every 16 steps and times 16.

    Mixed precision: call it under autocast, then `scaler.scale(loss).backward()`. Penalties are built from gradients of the
    unscaled scalars and accumulated in float32, so the scaler's scale does not enter them; where float16 rounds these inner
    gradients to zero, `gr.inner_scale` keeps them.

    Args:
        task: `(outputs, targets) -> scalar`, for example `torch.nn.functional.cross_entropy`; None for penalties alone.
        **regularizers: Regularizers by the name they get in the logs.

    Raises:
        GradregError: If an argument is not a regularizer.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> import gradreg as gr
        >>> from torch import nn
        >>> heads = [nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 2)) for _ in range(3)]
        >>> model = gr.SharedBase(nn.Linear(6, 4), heads)
        >>> objective = gr.Objective(F.cross_entropy, diversity=gr.regularizers.DiverseHeads(weight=10.0))
        >>> loss, logs = objective(model, (torch.randn(5, 6), torch.tensor([0, 1, 0, 1, 1])))
        >>> loss.backward()
        >>> sorted(logs), objective.step
        (['diversity', 'diversity/weight', 'loss', 'task'], 1)
    """

    def __init__(
        self, task: Callable[[Any, Any], Tensor] | None, *unnamed: Regularizer, **regularizers: Regularizer
    ) -> None:
        super().__init__()
        if unnamed:
            raise GradregError(
                f"Regularizers need names for the logs: Objective(task, name={type(unnamed[0]).__name__}(...))."
            )
        for name, regularizer in regularizers.items():
            if not isinstance(regularizer, Regularizer):
                raise GradregError(
                    f"{name}={regularizer!r} is not a gradreg.Regularizer; subclass it and write forward(model, batch) -> scalar."
                )
            if "_first_call" not in vars(regularizer):
                raise GradregError(f"{type(regularizer).__name__}.__init__ must call super().__init__(weight).")
            if name in ("loss", "task"):
                raise GradregError(f"A regularizer may not be called {name!r}: the logs have an entry of that name.")
        if task is not None and not callable(task):
            raise GradregError(f"task={task!r} is not callable; give (outputs, targets) -> scalar.")
        self.task = task
        self.regularizers = nn.ModuleDict(regularizers)
        self.step = 0

    def forward(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and the logs of one step.

        Args:
            model: The model as it is trained, also wrapped in DistributedDataParallel.
            batch: A `Batch`, or what `as_batch` reads.

        Returns:
            The loss with graph (without, under `no_grad`), and a dictionary of detached values: `loss`, `task`, and per
            regularizer `name`, its unweighted value where it was computed, and `name/weight`, which is 0 where not.

        Raises:
            NonFiniteLossError: If a part is NaN or infinite; step and part are named, and nothing was counted or moved.
            CompatibilityError: If no parameter requires grad.
        """
        batch = as_batch(batch)
        wants_grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if wants_grad and not any_trainable(model) and not batch.requires_grad:
            raise CompatibilityError(
                f"No parameter of the {type(unwrap(model)).__name__} requires grad: there is nothing to train. Unfreeze some "
                "(requires_grad_(True)), or evaluate under torch.no_grad()."
            )
        weighted = self._weighted()
        active = {name: (regularizer, weight) for name, (regularizer, weight) in weighted.items() if weight != 0}
        shares = [share for regularizer, _ in active.values() for share in regularizer.shares()]
        parts: dict[str, Tensor] = {}
        with open_session(model, batch, shares) as session, grad_mode() if active else nullcontext():
            if self.task is not None:
                parts["task"] = self._task(session, batch)
            total = parts["task"] if parts else torch.zeros(())
            for name, (regularizer, weight) in active.items():
                parts[name] = regularizer(model, batch)
                total = total + weight * parts[name]
            self._check_finite(total, parts)
            if self.training:
                for regularizer, _ in active.values():
                    regularizer.update(model, batch)
                self.step += 1
        total = total if wants_grad else total.detach()
        logs: dict[str, Any] = {"loss": total.detach(), **{name: part.detach() for name, part in parts.items()}}
        logs.update({f"{name}/weight": weight for name, (_, weight) in weighted.items()})
        return total, logs

    def _weighted(self) -> dict[str, tuple[Regularizer, float]]:
        """Return the regularizers with their weights at this step."""
        return {
            name: (regularizer, weight_at(regularizer.weight, self.step, name))
            for name, regularizer in self.regularizers.items()
            if isinstance(regularizer, Regularizer)
        }

    def _task(self, session: Session, batch: Batch) -> Tensor:
        task, shift = self.task, is_causal_language_model(session.inner)
        elementwise = isinstance(task, nn.modules.loss._Loss) or getattr(task, "__module__", "") == F.__name__
        if task is None or batch.targets is None:
            raise ScalarError(
                "The task needs targets, but the batch has none. Pass (inputs, targets) or Batch(inputs, targets); a mapping "
                f'targets are called "labels" (found {", ".join(map(repr, batch.input_names))}).'
            )
        outputs, targets = session.outputs, session.capture.batch.targets
        try:
            readable: Any = read_outputs(outputs)
        except ScalarError:
            readable = None  # a task of the user's own that reads named outputs
        if readable is not None and readable.is_cuda:
            check_labels(task, readable, targets)  # a kernel that meets such a label ends the process

        def one(own: Any) -> Tensor:
            value = (
                task(own, targets)
                if readable is None
                else task(*paired(own, targets, shift=shift, elementwise=elementwise))
            )
            if not isinstance(value, Tensor) or value.dim() != 0:
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ScalarError(f"The task must return a scalar (it keeps its own reduction), found {found}.")
            return value

        try:
            if session.heads is not None and _is_classification(task, outputs, targets):
                return _over_heads(task, outputs, targets)
            return one(outputs) if session.heads is None else map_heads(one, outputs, session.heads, axis=0).mean()
        except (IndexError, RuntimeError):
            check_labels(task, readable, targets)  # says more than torch's "Target 3 is out of bounds."
            raise

    def _check_finite(self, total: Tensor, parts: dict[str, Tensor]) -> None:
        if math.isfinite(total.item()):
            return
        bad = {name: float(part.detach()) for name, part in parts.items() if not bool(torch.isfinite(part))}
        named = ", ".join(f"{name!r} is {value}" for name, value in bad.items()) or "the weighted sum overflows"
        raise NonFiniteLossError(
            f"The loss is not finite at step {self.step}: {named}. Nothing was counted or moved. Look at "
            "this batch and the step size; torch.autograd.set_detect_anomaly(True) finds the operation."
        )

    def get_extra_state(self) -> dict[str, int]:
        """Return the step for the state dict."""
        return {"step": self.step}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Take the step from the state dict."""
        self.step = int(state["step"])


def _is_classification(task: object, outputs: Any, targets: Any) -> bool:
    """Whether the task is the cross-entropy of logits `[n, K, C]` and labels `[n]`, reduced."""
    if not isinstance(outputs, Tensor) or outputs.dim() != 3 or not isinstance(targets, Tensor) or targets.dim() != 1:
        return False
    return task is F.cross_entropy or (type(task) is nn.CrossEntropyLoss and task.reduction != "none")


def _over_heads(task: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    """Average the cross-entropy over heads in one call: all heads have the same labels, hence the same denominator."""
    heads = outputs.shape[1]
    value = task(outputs.flatten(0, 1), targets.repeat_interleave(heads))
    return value / heads if getattr(task, "reduction", "mean") == "sum" else value
