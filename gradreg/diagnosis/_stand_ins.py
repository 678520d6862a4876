"""What stands in for an activation: modules and functions that compute its smooth or its second-pass form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradreg.diagnosis._activations import ACTIVATIONS, OF_FUNCTION, Activation
from gradreg.diagnosis._second_pass import is_exact, with_second_derivative
from gradreg.model import all_modules


@dataclass(eq=False)
class Scheme:
    """How activations are replaced.

    Attributes:
        beta: Sharpness of the smooth forms.
        second_pass: Whether values and first derivatives stay as they are.
        modules: Replacements of the user's own: from module class to a factory that is given the old module; None keeps it.
        functions: The same for functions.
    """

    beta: float
    second_pass: bool = False
    modules: dict[type[nn.Module], Callable[[nn.Module], nn.Module] | None] = field(default_factory=dict)
    functions: dict[Any, Callable[..., Tensor] | None] = field(default_factory=dict)
    made: dict[Any, StandIn] = field(default_factory=dict)

    def row(self, function: Any) -> Activation | None:
        """Return the activation that a function computes, if it is one to be replaced in the ordinary way."""
        try:
            row = OF_FUNCTION.get(function)
        except TypeError:  # not hashable
            return None
        if row is None or row.module in self.modules or (self.second_pass and row.bends is None):
            return None
        return row

    def replaces(self, function: Any) -> bool:
        """Whether calls of a function are replaced."""
        try:
            if function in self.functions:
                return self.functions[function] is not None
        except TypeError:
            return False
        return self.row(function) is not None

    def compute(self, row: Activation, x: Tensor, in_place: bool, settings: dict[str, Any]) -> Tensor:
        """Return the replaced activation of a tensor."""
        source = x.clone() if in_place else x
        if self.second_pass:
            result = with_second_derivative(row, source, self.beta, settings)
        else:
            result = row.smooth(source, self.beta, **settings)
        return x.copy_(result) if in_place else result

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what stands in for a call of a function that is replaced."""
        own = self.functions.get(function)
        if own is not None:
            return own(*args, **kwargs)
        row = self.row(function)
        assert row is not None
        x, in_place, settings = row.bound(args, kwargs)
        return self.compute(row, x, in_place or function.__name__.endswith("_"), settings)

    def stand_in(self, function: Any) -> StandIn:
        """Return the function that stands in for another; the same one every time, so that equal heads stay equal."""
        return self.made.setdefault(function, StandIn(self, function))


class StandIn:
    """A function in the place of an activation function, where a module keeps one as an attribute."""

    def __init__(self, scheme: Scheme, function: Any) -> None:
        self.scheme, self.function = scheme, function
        self.__name__ = getattr(function, "__name__", "activation")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute it."""
        return self.scheme.call(self.function, args, kwargs)

    def __repr__(self) -> str:
        """Say what it stands for."""
        return f"<{'second-pass' if self.scheme.second_pass else 'smooth'} {self.__name__}, beta={self.scheme.beta:g}>"


class ActivationStandIn(nn.Module):
    """A module in the place of an activation; it takes over the object, with its parameters, flags and hooks."""

    row: Activation
    _gradreg_scheme: Scheme

    def forward(self, x: Tensor) -> Tensor:
        """Compute the replaced activation."""
        settings = {name: getattr(self, name) for name in self.row.settings}
        return self._gradreg_scheme.compute(self.row, x, bool(getattr(self, "inplace", False)), settings)

    def extra_repr(self) -> str:
        """Show the sharpness and the settings."""
        plain = {name: getattr(self, name) for name in self.row.settings if name not in ("weight", "training")}
        shown = [f"{name}={value}" for name, value in {"beta": self._gradreg_scheme.beta, **plain}.items()]
        return ", ".join([*shown, "inplace=True"] if getattr(self, "inplace", False) else shown)


def _module_class(row: Activation, prefix: str) -> type[ActivationStandIn]:
    return type(f"{prefix}{row.module.__name__}", (ActivationStandIn,), {"row": row, "__module__": __name__})


SMOOTH = {row.module: _module_class(row, "Smooth") for row in ACTIVATIONS}
SECOND_PASS = {row.module: _module_class(row, "SecondPass") for row in ACTIVATIONS if row.bends is not None}
globals().update({kind.__name__: kind for kind in (*SMOOTH.values(), *SECOND_PASS.values())})  # where pickle looks


class _Calls(TorchFunctionMode):
    """Replace calls of activation functions inside the context."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer calls of activations; pass all others on."""
        if is_exact() or not self.scheme.replaces(func):
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.scheme.call(func, args, kwargs or {})


class OwnCalls:
    """Mixed into the class of a module whose own forward calls activation functions."""

    _gradreg_scheme: Scheme
    _gradreg_plain: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the class that is mixed in, since this one has no name of its own."""
        return _as_own_calls, (self._gradreg_plain,), vars(self)


def _as_own_calls(plain: type[nn.Module]) -> nn.Module:
    kind = own_calls_class(plain)
    return kind.__new__(kind)


_OWN_CALLS: dict[Any, type[nn.Module]] = {}  # one per class, so that equal heads stay equal


def own_calls_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose forward has its calls of activation functions replaced."""
    if plain in _OWN_CALLS:
        return _OWN_CALLS[plain]

    @functools.wraps(plain.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Calls(self._gradreg_scheme):
            return plain.forward(self, *args, **kwargs)

    body = {"forward": forward, "_gradreg_plain": plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
    kind = type(plain.__name__, (OwnCalls, plain), {**body, "__qualname__": plain.__qualname__})
    return _OWN_CALLS.setdefault(plain, kind)


def has_second_pass(model: nn.Module) -> bool:
    """Whether second derivatives of a model's activations are stand-ins at this moment, so that differences disagree."""
    return any(
        scheme.second_pass
        for module in all_modules(model)
        for value in vars(module).values()
        for scheme in ([value] if isinstance(value, Scheme) else [value.scheme] if isinstance(value, StandIn) else [])
    )


class Watch(TorchFunctionMode):
    """Note which activation functions are called that a scheme would replace."""

    def __init__(self, scheme: Scheme, note: Callable[[str], None]) -> None:
        super().__init__()
        self.scheme, self.note = scheme, note

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note and pass on."""
        if not is_exact() and self.scheme.replaces(func):
            self.note(func.__name__)
        return func(*args, **kwargs) if kwargs else func(*args)
