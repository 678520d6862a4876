"""Recording an evaluation: which operations ran in which module, and between which tensors gradients were taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gradreg.engine._coupling import nodes_between
from gradreg.model import attention_kernels, walk


@dataclass(eq=False)
class Call:
    """One call of a leaf module, of a function outside of any, or of a custom autograd Function.

    Attributes:
        name: The dotted name of the module; for a function that of the module in whose forward it ran; `""` outside.
        kind: The class of the module, or the name of the function.
        run: The call as a function of its arguments.
        args: Positional and named arguments, tensors detached and copied; of a batch under vmap the first example.
        sources: The place in the graph of every differentiable argument.
        spans: Smallest and largest value of every differentiable argument.
        nodes: The places in the graph of its outputs.
        module: The module, if it is one.
        function: The class of the custom autograd Function that is, or runs inside, the call.
        selects: Whether a mask or index was computed from values that are differentiated.
        outside: Whether it ran in no module of the model.
        kernels: Which attention kernels were allowed.
        graded: Which tensor arguments required grad, in order; some kernels are chosen by it.
    """

    name: str
    kind: str
    run: Callable[..., Any]
    args: tuple[tuple[Any, ...], dict[str, Any]]
    sources: list[Any]
    spans: list[tuple[float, float]]
    nodes: set[Any] = field(default_factory=set)
    module: nn.Module | None = None
    function: type | None = None
    selects: bool = False
    outside: bool = False
    kernels: tuple[bool, ...] = ()
    graded: tuple[bool, ...] = ()


@dataclass(eq=False)
class GradientCall:
    """One `torch.autograd.grad` with its path.

    Attributes:
        between: The nodes of the graph from which a tensor that is differentiated with respect to is reached.
        targets: The places of these tensors.
        upstream: Ids of the leaves from which these tensors were computed.
        keeps_graph: Whether the result can be differentiated again.
    """

    between: set[Any]
    targets: set[Any]
    upstream: set[int]
    keeps_graph: bool

    def passes(self, call: Call) -> bool:
        """Whether the recorded operation lies on the path."""
        return not self.between.isdisjoint(call.nodes)

    def active(self, call: Call) -> list[int]:
        """Return which differentiable arguments of a call depend on what is differentiated with respect to."""
        return [i for i, source in enumerate(call.sources) if source in self.between or source in self.targets]


@dataclass(eq=False)
class Record:
    """What happened in an evaluation.

    Attributes:
        calls: Operations in the order in which they ended.
        gradients: The gradients taken, in order.
        backwards: How often `Tensor.backward()` was called.
        raised: The innermost operation that raised, if one did.
    """

    calls: list[Call] = field(default_factory=list)
    gradients: list[GradientCall] = field(default_factory=list)
    backwards: int = 0
    raised: Call | None = None


@contextmanager
def recorded(model: nn.Module) -> Iterator[Record]:
    """Record what is called inside: hooks on all modules and a function mode, both gone afterwards.

    Heads with hooks run in a loop, so that every one is seen under its own name.

    Args:
        model: The module whose forwards run inside.

    Yields:
        The record, filled as things happen.
    """
    recorder = _Recorder()
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder.custom(cls, lambda *a, **k: original.__func__(cls, *a, **k), args, kwargs)

    with ExitStack() as stack:
        for name, module in walk(model):
            stack.callback(module.register_forward_pre_hook(recorder.enter(name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(recorder.leave, always_call=True).remove)
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]  # no mode sees it
        stack.callback(setattr, torch.autograd.Function, "apply", original)
        stack.enter_context(recorder)
        yield recorder.record


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self.open: list[tuple[str, Call | None]] = []  # modules being run; a leaf with its call
        self.quiet = 0
        self.chosen: dict[int, Tensor] = {}  # tensors without graph, computed from tensors with one

    def enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = None
            if not self.quiet and _is_leaf(module) and not self._in_leaf():
                call = self._call(name, type(module).__name__, module.forward, args, kwargs)
                call.module = module
            self.open.append((name, call))

        return hook

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # a module that raises in the pre-hook of another never entered
        if not self.open:
            return
        _, call = self.open.pop()
        if call is not None and output is None:
            self.record.raised = self.record.raised or call
        elif call is not None:
            self._done(call, output)

    def custom(self, cls: type, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a custom autograd Function; inside a leaf module it is noted with the module."""
        leaf = self.open[-1][1] if self.open else None
        if self.quiet or leaf is not None:
            if leaf is not None:
                leaf.function = cls
            return run(*args, **kwargs)
        call = self._call(self._here(), cls.__name__, run, args, kwargs)
        call.function = cls
        return self._run(call, run, args, kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the call, run it."""
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return self._grad(func, args, kwargs)
        if func is torch.Tensor.backward:
            self.record.backwards += 1
        kind = getattr(func, "__name__", "")
        if self.quiet or self._in_leaf() or kind in _SILENT or not _any_grad((args, kwargs)):
            output = func(*args, **kwargs)
            if not self.quiet and isinstance(output, Tensor) and not output.requires_grad:
                self._remember(output, args)
            return output
        call = self._call(self._here(), kind.strip("_"), func, args, kwargs)
        return self._run(call, func, args, kwargs)

    def _run(self, call: Call, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            output = run(*args, **kwargs)
        except Exception:
            self.record.raised = self.record.raised or call
            raise
        self._done(call, output)
        return output

    def _grad(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = _tensors(args[0] if args else kwargs["outputs"])
        inputs = _tensors(args[1] if len(args) > 1 else kwargs["inputs"])
        create = bool(args[4] if len(args) > 4 else kwargs.get("create_graph"))
        targets = {place(tensor) for tensor in inputs}
        between: set[Any] = set()
        for output in outputs:
            if output.grad_fn is not None:
                between |= nodes_between(output.grad_fn, targets)
        upstream = leaves_below([_inner(tensor) for tensor in inputs])
        self.record.gradients.append(GradientCall(between, targets, upstream, create))
        self.quiet += 1  # hooks of checkpointed modules fire again in a backward
        try:
            return func(*args, **kwargs)
        finally:
            self.quiet -= 1

    def _call(
        self, name: str, kind: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        floats = [leaf for leaf in _tensors((args, kwargs)) if is_differentiable(leaf)]
        copies = {id(leaf): _copied(leaf) for leaf in _tensors((args, kwargs))}
        kept = pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), (args, kwargs))
        return Call(
            name,
            kind,
            run,
            kept,
            [place(leaf) for leaf in floats],
            [_span(leaf) for leaf in floats],
            selects=any(id(leaf) in self.chosen for leaf in _tensors((args, kwargs))),
            outside=not self.open,
            kernels=attention_kernels(),
            graded=tuple(leaf.requires_grad for leaf in _tensors((args, kwargs))),
        )

    def _done(self, call: Call, output: Any) -> None:
        call.nodes = {leaf.grad_fn for leaf in _tensors(output) if leaf.grad_fn is not None}
        if call.nodes:
            self.record.calls.append(call)
        else:
            for leaf in _tensors(output):
                self.chosen[id(leaf)] = leaf

    def _remember(self, output: Tensor, args: tuple[Any, ...]) -> None:
        tensors = _tensors(args)
        if any(tensor.requires_grad or id(tensor) in self.chosen for tensor in tensors):
            self.chosen[id(output)] = output

    def _in_leaf(self) -> bool:
        return bool(self.open) and self.open[-1][1] is not None

    def _here(self) -> str:
        return self.open[-1][0] if self.open else ""


# Calls that only look at a tensor
_SILENT = frozenset(("__get__", "__set__", "size", "dim", "requires_grad_", "detach", "is_floating_point", "numel"))


def _is_leaf(module: nn.Module) -> bool:
    """Whether a module is one operation: a leaf of torch, or one of the user's own without parameters."""
    if any(child is not None for child in module._modules.values()):
        return False
    return type(module).__module__.startswith("torch.") or not any(True for _ in module.parameters())


def place(tensor: Tensor) -> Any:
    """Return what tells a tensor's place in the graph: the node that made it, or the leaf itself."""
    return tensor.grad_fn if tensor.grad_fn is not None else ("leaf", id(tensor))


def leaves_below(tensors: list[Tensor]) -> set[int]:
    """Return the ids of all leaves from which the non-leaves among tensors were computed."""
    found: set[int] = set()
    seen: set[Any] = set()
    stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        stack += [child for child, _ in node.next_functions if child is not None]
    return found


def is_differentiable(tensor: Tensor) -> bool:
    """Whether a tensor is real or complex floating point."""
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _any_grad(value: Any) -> bool:
    return any(leaf.requires_grad for leaf in _tensors(value))


def _inner(tensor: Tensor) -> Tensor:
    """Return the ordinary tensor under the wrappers of torch.func."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy that outlives transforms around; of a batch under vmap the first example. Parameters are kept."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    functorch = torch._C._functorch
    copy = tensor.detach().clone()
    while functorch.is_functorch_wrapped_tensor(copy):
        axis = functorch.maybe_get_bdim(copy) if functorch.is_batchedtensor(copy) else -1
        copy = functorch.get_unwrapped(copy)
        if axis >= 0:
            copy = copy.select(axis, 0)
    return copy


def _span(tensor: Tensor) -> tuple[float, float]:
    inner = _inner(tensor.detach())
    if not inner.numel() or inner.is_complex():
        return (0.0, 0.0)
    smallest, largest = _inner(inner.min()), _inner(inner.max())
    return (float(smallest), float(largest))
