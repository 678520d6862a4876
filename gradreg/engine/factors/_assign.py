"""Which call gives which parameter its gradient, so that every use counts once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from gradreg.engine.factors._axes import CallAxes
from gradreg.engine.factors._closed_forms import CHANNELS_SECOND, closed_form
from gradreg.engine.factors._record import Call

OUTSIDE = "it is used outside of the modules that hold parameters"
NO_AXIS = "the examples have no axis of their own in a call of the module that uses it"
STATEFUL = "it would be called a second time with an object that its first call may have changed"
CHANGED = "what the module read was changed in place afterwards"


# What a module can be given again; a cache of keys and values, for one, holds what the first call wrote
_PLAIN = (Tensor, bool, int, float, complex, str, bytes, slice, range, type(None), torch.dtype, torch.device, Enum)


@dataclass
class Assignment:
    """The calls that give gradients, and the parameters that none can serve.

    Attributes:
        closed: From call to `{attribute of the module: name of the parameter}`, by closed form.
        local: From call to `{name inside the module: name of the parameter}`, by the pullback of the module alone.
        rules: From the name of a parameter to the names of its rules.
        unserved: From the name of a parameter to the reason.
    """

    closed: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)
    local: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)
    rules: dict[str, list[str]] = field(default_factory=dict)
    unserved: dict[str, str] = field(default_factory=dict)


def assign(
    used: Mapping[str, list[int]],
    calls: Mapping[tuple[str, int], Call],
    axes: Mapping[tuple[str, int], CallAxes | None],
    parameters: Mapping[str, nn.Parameter],
) -> Assignment:
    """Give every use of a parameter to the innermost recorded call in which it lies.

    Args:
        used: From parameter to the numbers of the nodes that read it.
        calls: The recorded calls.
        axes: Where their examples are.
        parameters: By name.

    Returns:
        The assignment. A closed form serves the own parameters of its module, the pullback of a module all that is used in
        it; where one lies inside the other, the outer one alone counts.
    """
    found = Assignment()
    inner_to_outer = sorted(calls.values(), key=lambda call: call.end - call.start)
    for name, nodes in used.items():
        parameter = parameters[name]
        chosen: dict[tuple[str, int], Call] = {}
        for node in nodes:
            call, obstacle = _serving(node, inner_to_outer, axes, parameter)
            if call is None:
                found.unserved[name] = obstacle
                break
            chosen[call.key] = call
        else:
            found.rules[name] = _add(found, name, parameter, list(chosen.values()), axes)
    return found


def _serving(
    node: int,
    inner_to_outer: list[Call],
    axes: Mapping[tuple[str, int], CallAxes | None],
    parameter: nn.Parameter,
) -> tuple[Call | None, str]:
    """Return the innermost call around a node that can serve the parameter, or the first obstacle."""
    obstacles = []
    for call in inner_to_outer:
        if call.start <= node < call.end:
            obstacle = _obstacle(call, axes.get(call.key), parameter)
            if obstacle is None:
                return call, ""
            obstacles.append(obstacle)
    return None, obstacles[0] if obstacles else OUTSIDE


def _add(
    found: Assignment,
    name: str,
    parameter: nn.Parameter,
    chosen: list[Call],
    axes: Mapping[tuple[str, int], CallAxes | None],
) -> list[str]:
    """Enter the calls of a parameter; what lies inside of a module that is pulled back as a whole counts there."""
    attributes = {call.key: _own_attribute(call, axes[call.key], parameter) for call in chosen}
    whole = [call for call in chosen if attributes[call.key] is None]
    rules = []
    for call in chosen:
        if any(other is not call and _inside(call, other) for other in whole):
            continue
        attribute, form = attributes[call.key], closed_form(call.module)
        if attribute is not None and form is not None:
            found.closed.setdefault(call.key, {})[attribute] = name
            rules.append(form[0])
        else:
            inside = {id(own): key for key, own in call.module.named_parameters()}
            found.local.setdefault(call.key, {})[inside[id(parameter)]] = name
            rules.append(f"pullback of {type(call.module).__name__}")
    return list(dict.fromkeys(rules)) or ["unused"]


def _inside(call: Call, other: Call) -> bool:
    return other.start <= call.start and call.end <= other.end


def _own_attribute(call: Call, axes: CallAxes | None, parameter: nn.Parameter) -> str | None:
    """Return the attribute that holds the parameter, if the module has a closed form for where the examples are."""
    if closed_form(call.module) is None:
        return None
    if (
        isinstance(call.module, CHANNELS_SECOND)
        and axes is not None
        and any(axis.position for axis in axes.inputs if axis)
    ):
        return None
    return next((key for key, own in call.module._parameters.items() if own is parameter), None)


def _obstacle(call: Call, axes: CallAxes | None, parameter: nn.Parameter) -> str | None:
    if not call.unchanged:
        return CHANGED
    if all(own is not parameter for own in call.module.parameters()):
        return OUTSIDE
    if axes is None or axes.per_example is None:
        return NO_AXIS
    if any(axes.outputs[position] is None for position in call.edges) or all(axis is None for axis in axes.inputs):
        return NO_AXIS
    if _own_attribute(call, axes, parameter) is None and not all(isinstance(leaf, _PLAIN) for leaf in call.inputs):
        return STATEFUL
    return None
