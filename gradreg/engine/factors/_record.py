"""One forward that records the calls of modules: what went in, where the gradient of what came out will pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from gradreg.engine.factors._closed_forms import closed_form
from gradreg.engine.factors._consumers import now


@dataclass
class Call:
    """One call of a module.

    Attributes:
        name: Of the module.
        index: 0 for its first call in the forward.
        module: The module.
        inputs: The leaves of its arguments.
        structure: How arguments are made of the leaves: `(args, kwargs)`.
        versions: Of the leaves that are tensors, to notice a later change in place.
        start: Number of the first node of the graph that the call may have made.
        end: Number of the first node after the call.
        outputs: Shapes of the leaves of what it returned; None where a leaf is no tensor.
        edges: From the position of a leaf of the output to where its gradient passes.
    """

    name: str
    index: int
    module: nn.Module
    inputs: list[Any]
    structure: Any
    versions: list[int]
    start: int
    end: int = 0
    outputs: list[tuple[int, ...] | None] = field(default_factory=list)
    edges: dict[int, GradientEdge] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        """What the call is known by over forwards."""
        return self.name, self.index

    def note_versions(self) -> None:
        """Remember the state of the arguments."""
        self.versions = [leaf._version for leaf in self.inputs if isinstance(leaf, Tensor)]

    @property
    def unchanged(self) -> bool:
        """Whether the arguments still hold what the module saw."""
        tensors = (leaf for leaf in self.inputs if isinstance(leaf, Tensor))
        return all(tensor._version == version for tensor, version in zip(tensors, self.versions, strict=True))


@contextmanager
def recorded(
    modules: Mapping[str, nn.Module], expanded: Mapping[tuple[str, int], bool], rows: int
) -> Iterator[dict[tuple[str, int], Call]]:
    """Record the calls of modules in the forward inside.

    Hooks of the user may change arguments and results. For a closed form what counts is what the module's own forward saw and
    returned, so they stay outside; the pullback of a module calls it with its hooks, so they stay inside. A recomputation of
    checkpointed parts, which happens in the backward, is not recorded.

    Args:
        modules: By name.
        expanded: Calls whose input is the same for all examples: it is repeated for every example, so that gradients of
            examples can be told apart; along its leading axis if the value is true, else along a new one.
        rows: The number of examples.

    Yields:
        The calls, in the order in which they end.
    """
    calls: dict[tuple[str, int], Call] = {}
    counts: dict[str, int] = {}
    running: list[Call] = []
    handles: list[Any] = []
    for name, module in modules.items():
        before, see, after = _hooks(name, calls, counts, running, expanded, rows)
        closed = closed_form(module) is not None
        handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        if closed:
            handles.append(module.register_forward_pre_hook(see, with_kwargs=True))
        handles.append(module.register_forward_hook(after, prepend=closed))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _hooks(
    name: str,
    calls: dict[tuple[str, int], Call],
    counts: dict[str, int],
    running: list[Call],
    expanded: Mapping[tuple[str, int], bool],
    rows: int,
) -> tuple[Any, Any, Any]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, Tensor) and is_functorch_wrapped_tensor(leaf) for leaf in leaves):
            return None  # inside a transform of the model's own
        index = counts.get(name, 0)
        counts[name] = index + 1
        call = Call(name, index, module, leaves, structure, [], now())
        running.append(call)
        if (name, index) not in expanded:
            call.note_versions()
            return None
        leading = expanded[name, index]
        call.inputs = [_repeated(leaf, rows, leading) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call.note_versions()
        return pytree.tree_unflatten(call.inputs, structure)

    def see(module: nn.Module, args: Any, kwargs: Any) -> None:
        if running and running[-1].module is module:
            running[-1].inputs, running[-1].structure = pytree.tree_flatten((args, kwargs))
            running[-1].note_versions()

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if not running or running[-1].module is not module:
            return None
        call = running.pop()
        call.end = now()
        leaves, structure = pytree.tree_flatten(output)
        call.outputs = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
        attached = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        several = len(attached) > 1 and closed_form(module) is None
        for position in attached:
            if several:  # one may be made of another: what passes here is to come from outside alone
                leaves[position] = leaves[position].view_as(leaves[position])
            call.edges[position] = get_gradient_edge(leaves[position])
        calls[call.key] = call
        return pytree.tree_unflatten(leaves, structure) if several else None

    return before, see, after


def _repeated(tensor: Tensor, rows: int, leading: bool) -> Tensor:
    """Give a tensor that is the same for all examples an axis of examples."""
    if not leading:
        return tensor.unsqueeze(0).expand(rows, *tensor.shape)
    return tensor.expand(rows, *tensor.shape[1:]) if len(tensor) == 1 else tensor
