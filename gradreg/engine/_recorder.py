"""Hooks that record the outputs and attention weights of modules in a forward, and put other values in their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradreg.engine._points import Points
from gradreg.errors import CompatibilityError, GradregError, UnknownNameError, closest
from gradreg.model import MAP_SUFFIX, Tap, train_mode_batch_norms


@dataclass
class Recorded:
    """An activation recorded in the forward.

    Attributes:
        tensor: The tensor that the model goes on with.
        batch_axis: Its axis of examples.
        head: The head in whose run it was recorded, if any.
        source: What the module was given, where that is one tensor.
        version: How often that had been written to.
    """

    tensor: Tensor
    batch_axis: int = 0
    head: int | None = None
    source: Tensor | None = None
    version: int = 0


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; what inference_mode made keeps no count, and is not written to outside of it."""
    return 0 if tensor.is_inference() else tensor._version


def attached(tensor: Tensor, *, keep_graph: bool) -> Tensor:
    """Return a tensor to differentiate with respect to: an alias in the caller's graph, or a leaf of our own."""
    if tensor.is_inference():
        tensor = tensor.clone()  # made under inference_mode, where nothing can be saved for a backward
    if keep_graph and tensor.requires_grad:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_()


class Recorder:
    """Forward hooks for the wanted activations, removed whatever happens."""

    def __init__(
        self,
        points: Points,
        at: dict[str, Tensor],
        shift: dict[str, Tensor],
        tap: Tap | None,
        keep_graph: bool,
        transformed: bool,
        examples: int,
    ) -> None:
        self.examples = examples
        self.points, self.at, self.shift, self.tap = points, at, shift, tap
        self.keep_graph, self.transformed = keep_graph, transformed
        self.handles: list[Any] = []
        self.calls: dict[str, int] = {}
        self.found: dict[tuple[str, int], Recorded] = {}
        self.normalized: dict[Any, str] = {}

    def attach(self, inner: nn.Module, modules: list[nn.Module]) -> None:
        # normalizations first: their hook must see the module's own output, before a point is made of it
        if not self.transformed:
            for name in train_mode_batch_norms(inner, modules):
                self.handles.append(inner.get_submodule(name).register_forward_hook(self._norm_hook(name)))
        for name in self.points.activations:
            if not name.endswith(MAP_SUFFIX):
                self.handles.append(inner.get_submodule(name).register_forward_hook(self._hook(name)))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _norm_hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                self.normalized[output.grad_fn] = name

        return hook

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            index = self.calls.get(name, 0)
            self.calls[name] = index + 1
            wanted = self.points.calls.get(name)
            if wanted is not None and index not in wanted:
                return None
            leaves, structure = pytree.tree_flatten(output)
            position = next(
                (i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None
            )
            if position is None:
                raise CompatibilityError(
                    f"Module {name!r} returns no floating-point tensor to differentiate with respect to."
                )
            leaves[position] = self._point(name, index, leaves[position])
            if len(args) == 1 and isinstance(args[0], Tensor) and not self.transformed:
                recorded = self.found[name, index]
                recorded.source, recorded.version = args[0], version_of(args[0])
            return pytree.tree_unflatten(leaves, structure)

        return hook

    def see_map(self, module: str, weights: Tensor) -> Tensor:
        """Record the attention weights of a module if they are wanted; return those to go on with."""
        name = module + MAP_SUFFIX
        index = self.calls.get(name, 0)
        self.calls[name] = index + 1
        if name not in self.points.activations or index not in self.points.calls.get(name, {index}):
            return weights
        return self._point(name, index, weights)

    def _point(self, name: str, index: int, value: Tensor) -> Tensor:
        key = f"{name}#{index}" if f"{name}#{index}" in {**self.at, **self.shift} or index else name
        axis = self.points.activations[name]
        if name in self.points.firings and value.shape[0] == 1 < self.examples:
            value = value.expand(self.examples, *value.shape[1:])  # positions, looked up once for all examples
        if key in self.at:
            given = self.at[key].movedim(0, axis)
            if given.shape != value.shape:
                raise GradregError(
                    f"at[{key!r}] has shape {tuple(self.at[key].shape)}; the activation, example first, has "
                    f"{tuple(value.movedim(axis, 0).shape)}."
                )
            value = given
        if key in self.shift:
            moved = self.shift[key].movedim(0, axis)
            if moved.shape != value.shape:
                raise GradregError(
                    f"A direction of {key!r} has shape {tuple(moved.shape)}; the activation {tuple(value.shape)}."
                )
            value = value + moved
        if self.transformed:
            self.found[name, index] = Recorded(value, axis)
            return value
        if key in self.at or not value.requires_grad:
            value = attached(value, keep_graph=self.keep_graph)
        self.found[name, index] = Recorded(value, axis, self.tap.head if self.tap is not None else None)
        return value.clone()  # what follows may work in place (ReLU(inplace=True)); the recorded tensor must not change

    def named(self) -> dict[str, Recorded]:
        """Return what was recorded, called `name` for a single call and `name#k` for several."""
        if not self.points.activations:
            return {}
        for name, expected in self.points.firings.items():
            if self.calls.get(name, 0) != expected:
                raise CompatibilityError(
                    f"The embedding {name!r} was called {self.calls.get(name, 0)} times in a forward, not {expected}: it is not "
                    "where the inputs come in, or not the only place (were inputs_embeds passed?). Name the module whose output "
                    'is meant: Activations("<module>").'
                )
        silent = [name for name in self.points.activations if name not in self.calls]
        if self.points.required & set(silent) or (silent and not self.calls):
            raise CompatibilityError(
                f"Module {silent[0]!r} was not called in the forward (or only inside a fused kernel), so it has no activation."
            )
        self._check_maps()
        for name, wanted in self.points.calls.items():
            missing = [index for index in wanted if index >= self.calls.get(name, 0)]
            if missing:
                raise UnknownNameError(
                    f"Activations('{name}#{missing[0]}'): the module was called {self.calls[name]} times."
                )
        named = {
            name if self.calls[name] == 1 else f"{name}#{index}": recorded
            for (name, index), recorded in self.found.items()
        }
        for key in {**self.at, **self.shift}:
            if key.partition("#")[0] in self.points.activations and key not in named:
                raise UnknownNameError(f"There is no activation {key!r}; this forward has {closest(key, named)}.")
        return named

    def _check_maps(self) -> None:
        """Compare the attention calls of this forward with those of the first look at the model."""
        if self.points.attentions is None:
            return
        expected = {name + MAP_SUFFIX: count for name, count in self.points.attentions.calls.items()}
        for name, count in self.calls.items():
            if name.endswith(MAP_SUFFIX) and count != expected.get(name, 0):
                raise CompatibilityError(
                    f"{name.removesuffix(MAP_SUFFIX)!r} computed attention {count} times in this forward and "
                    f"{expected.get(name, 0)} times when the model was looked at: its attention depends on the data or on what "
                    "was called before, and a map could be missing or be another one."
                )
