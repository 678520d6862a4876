r"""The direction that a real optimizer step on one example alone would take, from the saved state of the optimizer.

With $g$ the gradient of the example, the direction is $(\theta_{before} - \theta_{after}) / \mathrm{lr}$, all of it: momentum
and weight decay belong to the step and are in it. SGD gives $g$ back where neither is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradreg.engine import Factors
from gradreg.errors import CheckpointError
from gradreg.tracin._optimizer_order import ordered_names

__all__ = ["OptimizerStep"]

Rule = Callable[[Tensor, Tensor, Mapping[str, Any], Mapping[str, Any]], Tensor]


class OptimizerStep:
    """From gradients of rows to the directions of their steps.

    Args:
        state: State dict of a torch.optim Adam, AdamW or SGD.
        parameters: The parameters of the model, all of them, with the weights of the checkpoint.
        selected: Names of those that are looked at.
        order: Names in the order of the optimizer, where it cannot be told.
        place: For messages.

    Raises:
        CheckpointError: If the optimizer is another one, or does not fit the parameters.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        parameters: Mapping[str, Tensor],
        selected: Sequence[str],
        order: Sequence[str] | None,
        place: str,
    ) -> None:
        self._parameters = {name: parameters[name].detach() for name in selected}
        self._groups: dict[str, Mapping[str, Any]] = {}
        self._states: dict[str, Mapping[str, Any]] = {}
        names = ordered_names(state, parameters, order, place)
        for group, members in zip(state["param_groups"], names, strict=True):
            self._rule(group, place)
            for index, name in zip(group["params"], members, strict=True):
                self._groups[name] = group
                self._states[name] = state["state"].get(index, {})
        absent = [name for name in selected if name not in self._groups]
        if absent:
            raise CheckpointError(
                f"{place}: the optimizer does not train {absent[0]!r} ({len(absent)} of the selected parameters). Select what it "
                "trains, params=..., or freeze the rest."
            )
        rates = {float(self._groups[name]["lr"]) for name in selected}
        if len(rates) > 1:
            raise CheckpointError(
                f"{place}: the parameter groups have different learning rates, {sorted(rates)}, so a step is no multiple of one. "
                "Select the parameters of one group: params=..."
            )

    def __call__(self, gradients: Factors) -> Factors:
        """Return the directions of the steps of all rows."""
        return Factors.written_out({name: self._direction(name, gradients.gradient(name)) for name in self._parameters})

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        group, state = self._groups[name], self._states[name]
        if not state and not bool(gradient.any()):
            return torch.zeros_like(gradient)  # never had a gradient and has none: the optimizer passes it over
        if group.get("maximize"):
            gradient = -gradient
        parameter = self._parameters[name].to(gradient)
        moved = {key: v.to(gradient) if isinstance(v, Tensor) and key != "step" else v for key, v in state.items()}
        direction: Tensor = self._rule(group, name)(gradient, parameter, group, moved)
        return direction

    @staticmethod
    def _rule(group: Mapping[str, Any], place: str) -> Rule:
        if {"betas", "eps", "amsgrad"} <= set(group):
            if group["weight_decay"] and "decoupled_weight_decay" not in group:
                raise CheckpointError(
                    f"{place}: an optimizer that was saved before torch 2.7 does not say whether it is Adam or AdamW. Set "
                    "'decoupled_weight_decay' in its parameter groups (True for AdamW), and give it as Checkpoint(optimizer=...)."
                )
            return _adam
        if {"momentum", "dampening", "nesterov"} <= set(group):
            return _sgd
        raise CheckpointError(
            f"{place}: the step of this optimizer is not known (its parameter groups have {sorted(set(group) - {'params'})}); "
            'known are torch.optim.Adam, AdamW and SGD. update="gradient" needs no optimizer.'
        )


def _adam(g: Tensor, parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980, algorithm 1) and AdamW (arXiv 1711.05101, algorithm 2)."""
    decay, decoupled = float(group["weight_decay"]), bool(group.get("decoupled_weight_decay", False))
    if decay and not decoupled:
        g = g + decay * parameter
    first, second = (float(beta) for beta in group["betas"])
    step = float(state.get("step", 0)) + 1
    zero = torch.zeros_like(parameter)
    mean = first * state.get("exp_avg", zero) + (1 - first) * g
    square: Tensor = second * state.get("exp_avg_sq", zero) + (1 - second) * g.square()
    if group["amsgrad"]:
        square = torch.maximum(state.get("max_exp_avg_sq", zero), square)
    root: Tensor = (square / (1 - second**step)).sqrt()
    direction: Tensor = mean / (1 - first**step) / (root + float(group["eps"]))
    return direction + decay * parameter if decay and decoupled else direction


def _sgd(g: Tensor, parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """SGD with momentum as torch.optim has it: the first buffer is the gradient itself, undamped."""
    decay, momentum = float(group["weight_decay"]), float(group["momentum"])
    g = g + decay * parameter if decay else g
    if not momentum:
        return g
    buffer: Tensor | None = state.get("momentum_buffer")
    buffer = g if buffer is None else momentum * buffer + (1 - float(group["dampening"])) * g
    return g + momentum * buffer if group["nesterov"] else buffer
