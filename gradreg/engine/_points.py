"""With respect to what, resolved against a model: the points of one forward, and parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine._maps import Attentions, attentions
from gradreg.engine._tokens import token_embeddings
from gradreg.errors import BatchError, CompatibilityError, GradregError, HeadsError, UnknownNameError, closest
from gradreg.model import MAP_SUFFIX, SharedBase, parameter_aliases
from gradreg.wrt import Activations, AttentionMaps, Embeddings, Features, Inputs, Outputs, Params, Wrt, match_names


@dataclass
class Points:
    """What one forward shall record.

    Attributes:
        inputs: Names of inputs.
        features: Whether the features of a `SharedBase`.
        outputs: Whether the outputs.
        activations: From module name, or `module:attention`, to the axis of examples.
        calls: From module name to the calls that are wanted; absent means all.
        required: Modules named in full, which must be called; those of a glob may be containers that never are.
        firings: How often an embedding must be called in a forward, where that is known.
        attentions: How attention maps are reached, if any are wanted.
    """

    inputs: tuple[str, ...] = ()
    features: bool = False
    outputs: bool = False
    activations: dict[str, int] = field(default_factory=dict)
    calls: dict[str, set[int]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    firings: dict[str, int] = field(default_factory=dict)
    attentions: Attentions | None = None

    def __bool__(self) -> bool:
        return bool(self.inputs or self.features or self.outputs or self.activations)

    def merged(self, other: Points) -> Points:
        """Return the union."""
        if not self or not other:
            return self or other
        activations = dict(self.activations)
        calls = {name: set(wanted) for name, wanted in self.calls.items()}
        for name, axis in other.activations.items():
            if activations.setdefault(name, axis) != axis:
                raise GradregError(
                    f"Activations({name!r}) is asked for with batch_axis {activations[name]} and {axis}."
                )
            if name in self.activations and name in calls and name in other.calls:
                calls[name] |= other.calls[name]
            elif name in self.activations and name in calls:
                del calls[name]
            elif name not in self.activations and name in other.calls:
                calls[name] = set(other.calls[name])
        return Points(
            tuple(dict.fromkeys(self.inputs + other.inputs)),
            self.features or other.features,
            self.outputs or other.outputs,
            activations,
            calls,
            self.required | other.required,
            {**self.firings, **other.firings},
            self.attentions or other.attentions,
        )

    def only(self, keys: Iterable[str]) -> Points:
        """Return the activations and maps among these result keys, with all that is needed to reach them."""
        names = {key.partition("#")[0] for key in keys} & self.activations.keys()
        return Points(
            activations={name: axis for name, axis in self.activations.items() if name in names},
            firings={name: count for name, count in self.firings.items() if name in names},
            attentions=self.attentions if any(name.endswith(MAP_SUFFIX) for name in names) else None,
        )

    def covers(self, other: Points) -> bool:
        """Whether all that the other wants is recorded here."""
        return (
            set(other.inputs) <= set(self.inputs)
            and self.features >= other.features
            and self.outputs >= other.outputs
            and all(self.activations.get(name) == axis for name, axis in other.activations.items())
            and all(
                name not in self.calls or other.calls.get(name, {-1}) <= self.calls[name] for name in other.activations
            )
        )


def resolve_points(inner: nn.Module, batch: Batch, wrt: tuple[Wrt, ...]) -> Points:
    """Resolve names and globs to what the forward shall record.

    Raises:
        BatchError: If an input cannot be differentiated.
        HeadsError: If features are asked of a model without a shared base.
        UnknownNameError: If a name or glob matches nothing.
    """
    points = Points()
    for item in wrt:
        if isinstance(item, Inputs):
            points = points.merged(Points(inputs=_inputs(batch, item.name)))
        elif isinstance(item, Features):
            if not isinstance(inner, SharedBase):
                if type(inner).__name__ == "OptimizedModule":
                    raise HeadsError(
                        "Features() needs a SharedBase; a compiled one hides it. Pass the uncompiled model (model._orig_mod)."
                    )
                raise HeadsError(
                    f"Features() needs a SharedBase; the model is: {type(inner).__name__}. Use Inputs(), or "
                    'Activations("<module>") for the output of one of its modules.'
                )
            points = points.merged(Points(features=True))
        elif isinstance(item, Outputs):
            points = points.merged(Points(outputs=True))
        elif isinstance(item, Activations):
            points = points.merged(_activations(inner, item))
        elif isinstance(item, Embeddings):
            points = points.merged(_embeddings(inner, batch, item))
        elif isinstance(item, AttentionMaps):
            points = points.merged(_maps(inner, batch, item))
    return points


def resolve_params(inner: nn.Module, wrt: tuple[Wrt, ...]) -> dict[str, nn.Parameter]:
    """Resolve globs to trainable parameters by their first names.

    Raises:
        UnknownNameError: If a glob matches no parameter, or frozen ones only.
    """
    globs = [item.glob for item in wrt if isinstance(item, Params)]
    if not globs:
        return {}
    aliases = parameter_aliases(inner)
    named = dict(inner.named_parameters())
    wanted: set[str] = set()
    for glob in globs:
        matched = {aliases[name] for name in match_names(glob, aliases, "parameter")}
        trainable = {name for name in matched if named[name].requires_grad}
        if not trainable:
            raise UnknownNameError(
                f"Params({glob!r}) matches frozen parameters only ({closest(glob, matched)}); gradients are taken with "
                "respect to parameters with requires_grad=True."
            )
        wanted |= trainable
    return {name: parameter for name, parameter in named.items() if name in wanted}


def _inputs(batch: Batch, name: str | None) -> tuple[str, ...]:
    named = batch.named_inputs()
    if name is None:
        found = tuple(key for key, value in named.items() if isinstance(value, Tensor) and value.is_floating_point())
        if not found:
            kinds = ", ".join(f"{key}: {getattr(value, 'dtype', type(value).__name__)}" for key, value in named.items())
            raise BatchError(f"Inputs() finds no floating-point input ({kinds}).{_hint(*named.values())}")
        return found
    if name not in named:
        raise UnknownNameError(f"The batch has no input {name!r}; its inputs are {closest(name, named)}.")
    value = named[name]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise BatchError(f"Input {name!r} is {kind} and cannot be differentiated.{_hint(value)}")
    return (name,)


def _hint(*values: Any) -> str:
    if any(isinstance(value, Tensor) and value.is_complex() for value in values):
        return (
            " Gradients with respect to complex inputs are not per-entry derivatives: give the model real and imaginary parts, "
            "torch.view_as_real(x), and let it join them."
        )
    return (
        " Integer inputs such as token ids have no gradient: differentiate with respect to the vectors they are turned into, "
        'wrt=Embeddings() (or Activations("<embedding module>")).'
    )


def _activations(inner: nn.Module, item: Activations) -> Points:
    glob, _, call = item.glob.partition("#")
    if call and not call.isdigit():
        raise GradregError(f"Activations({item.glob!r}): behind # stands the number of the call, counted from 0.")
    names = [name for name, _ in inner.named_modules(remove_duplicate=False) if name]
    matched = match_names(glob, names, "module")
    modules = dict(inner.named_modules(remove_duplicate=False))
    first: dict[int, str] = {}
    for name in names:
        first.setdefault(id(modules[name]), name)
    found = dict.fromkeys((first[id(modules[name])] for name in matched), item.batch_axis)
    literal = frozenset(found) if not set("*?") & set(glob) else frozenset()
    return Points(activations=found, calls={name: {int(call)} for name in found} if call else {}, required=literal)


def _embeddings(inner: nn.Module, batch: Batch, item: Embeddings) -> Points:
    if item.glob is not None:
        found = _activations(inner, Activations(item.glob))
        return replace(found, required=frozenset(found.activations), firings=dict.fromkeys(found.activations, 1))
    firings = token_embeddings(inner, batch)
    return Points(activations=dict.fromkeys(firings, 0), required=frozenset(firings), firings=firings)


def _maps(inner: nn.Module, batch: Batch, item: AttentionMaps) -> Points:
    found = attentions(inner, batch)
    names = [*found.calls, *found.silent]
    if not names:
        raise CompatibilityError(
            f"{type(inner).__name__} computes no attention that can be seen: no call of scaled_dot_product_attention and no "
            "softmax in a module that is called attention."
        )
    wanted = _of_layers(names, item.layers)
    silent = [name for name in wanted if name in found.silent]
    if silent:
        raise CompatibilityError(
            f"The attention weights of {', '.join(map(repr, silent[:3]))} cannot be seen: these modules call neither "
            "scaled_dot_product_attention nor a softmax over four axes. Name the layers you want, AttentionMaps(layers), or set "
            'the model to attn_implementation="sdpa" or "eager".'
        )
    if found.problem:
        raise CompatibilityError(f"Attention maps of {type(inner).__name__} would be wrong: {found.problem}.")
    keys = {name + MAP_SUFFIX: 0 for name in wanted}
    return Points(activations=keys, required=frozenset(keys), attentions=found)


def _of_layers(names: list[str], layers: int | tuple[int, ...] | str | None) -> list[str]:
    if layers is None:
        return names
    if isinstance(layers, str):
        return match_names(layers, names, "attention module")
    wanted = {layers} if isinstance(layers, int) else set(layers)
    numbers = {name: int(digits.group(1)) for name in names if (digits := re.search(r"(?:^|\.)(\d+)(?:\.|$)", name))}
    missing = wanted - set(numbers.values())
    if missing or not wanted:
        raise UnknownNameError(
            f"AttentionMaps({layers!r}): there is no attention in layer {sorted(missing)}; the attention modules are "
            f"{closest('', names)}, in layers {sorted(set(numbers.values()))}."
        )
    return [name for name, number in numbers.items() if number in wanted]
