"""smooth_activations: a model whose penalties on gradients reach all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, overload

from torch import nn

from gradreg.batch import as_batch
from gradreg.diagnosis._activations import OF_FUNCTION, OF_MODULE
from gradreg.diagnosis._stand_ins import Scheme
from gradreg.diagnosis._swap import Swap
from gradreg.errors import CompatibilityError, GradregError, GradregWarning, warn
from gradreg.model import copied, unwrap

BETAS = (1.0, 10.0)
"""Between these the smooth forms have a second derivative worth the name over the range of usual activations."""

Mapped = Mapping[Any, Any]


@dataclass(frozen=True)
class ActivationSwaps:
    """Which activations were replaced, and which could not be.

    Attributes:
        swapped: By dotted name, what became of it.
        left: By dotted name, why it could not be replaced, and what to do.
    """

    swapped: Mapping[str, str]
    left: Mapping[str, str]

    def __str__(self) -> str:
        """List both."""
        rows = [f"  {name}: {what}" for name, what in self.swapped.items()]
        rows += [f"  {name}: left as it is: {why}" for name, why in self.left.items()]
        return "\n".join([f"{len(self.swapped)} activations replaced, {len(self.left)} left", *rows])


class SecondPass(AbstractContextManager[ActivationSwaps]):
    """Gives a model's flat activations a second derivative, for the time of the context; see `smooth_activations`."""

    def __init__(self, model: nn.Module, scheme: Scheme, batch: Any) -> None:
        self._model, self._scheme, self._batch = model, scheme, batch
        self._open: list[Swap] = []

    def __enter__(self) -> ActivationSwaps:
        """Replace the activations."""
        swap = Swap(self._model, self._scheme)
        swap.apply(self._batch)
        self._open.append(swap)
        return _said(swap)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put them back."""
        self._open.pop().undo()


@overload
def smooth_activations(
    model: nn.Module,
    mapping: Mapped | None = None,
    *,
    beta: float = 10.0,
    surrogate: None = None,
    batch: Any = None,
) -> nn.Module: ...


@overload
def smooth_activations(
    model: nn.Module,
    mapping: Mapped | None = None,
    *,
    beta: float = 10.0,
    surrogate: Literal["second_pass"],
    batch: Any = None,
) -> SecondPass: ...


def smooth_activations(
    model: nn.Module,
    mapping: Mapped | None = None,
    *,
    beta: float = 10.0,
    surrogate: str | None = None,
    batch: Any = None,
) -> nn.Module | SecondPass:
    r"""Return a copy with smooth activations, or a context in which only the second derivative is smooth.

    A penalty on gradients trains through the second derivative of the activations, which is exactly zero for ReLU and its
    kin: with such heads the base of a `SharedBase` hears nothing of it. There are two ways out.

    **A smooth copy** (`surrogate=None`). Every hinge becomes $\mathrm{softplus}_\beta(x) = \log(1 + e^{\beta x}) / \beta$,
    without the threshold above which `torch.nn.Softplus` is linear and its second derivative exactly 0. Outputs change a
    little (an activation by at most $\log 2 / \beta$ per hinge of slope 1); train or fine-tune the copy.

    ===================================== ========================================================================
    ReLU                                  softplus
    LeakyReLU, PReLU, RReLU               $a x + (1 - a)$ softplus; PReLU keeps its learned slopes
    ReLU6, Hardtanh, Hardsigmoid          a difference of two softplus
    Softshrink, Hardshrink, Threshold     $x$ minus such a difference; sigmoids where the value jumps
    Hardswish                             $x$ times the smooth Hardsigmoid
    ===================================== ========================================================================

    ELU, CELU, SELU and Softplus curve on one side only, GELU, SiLU, Mish and Tanh everywhere; they are left. To have more than
    half the line: `mapping={nn.ELU: nn.SiLU}`.

    **A surrogate for the second pass** (`surrogate="second_pass"`), around the training code. Outputs, losses, their
    gradients and the value of the penalty stay exactly those of the model as it is; only where a gradient is differentiated
    again, a jump $J$ of a slope at $t$ counts as the second derivative $J \beta \sigma(\beta(x-t)) \sigma(\beta(t-x))$, that
    of the softplus. So the gradient of the penalty is no longer the derivative of its value (which is zero almost
    everywhere), and finite differences disagree with it on purpose. On leaving, the model is as before.

    Replaced are modules, functions kept as attributes (`nn.TransformerEncoderLayer.activation`), and calls such as
    `F.relu(x)` in a module's own forward, found in its source or, with a `batch`, by a run. What cannot be replaced, such as
    the ReLU inside `nn.RNN`, is listed, with a warning. Everything else is kept: parameters and their ties, buffers, modes,
    hooks, dtype, device, in-place behavior, names in the state dict.

    Args:
        model: Any module. The copy shares nothing with it.
        mapping: Other choices: from module class to a module class without arguments, to a function that makes the new module
            from the old one, or to None to leave it; from function to function or None.
        beta: Sharpness of the bends, in units of 1 / activation.
        surrogate: None or `"second_pass"`.
        batch: A batch to run the model on (in `no_grad`, without a trace), to find calls in helper functions.

    Returns:
        The copy; `copy.swaps` is an `ActivationSwaps`, and `str` of it a list. With a surrogate a context manager, which can be
        entered again and gives an `ActivationSwaps`.

    Raises:
        CompatibilityError: If the model cannot be copied, or is wrapped.
        GradregError: If an argument does not fit.

    References:
        Dombrowski et al. 2019, arXiv 1906.07983, replace ReLU by softplus of this beta to smooth explanations.

    Example:
        >>> import torch, gradreg as gr
        >>> from torch import nn
        >>> heads = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
        >>> model = gr.SharedBase(nn.Linear(6, 4), heads)
        >>> smooth = gr.smooth_activations(model)
        >>> print(smooth.swaps)
        2 activations replaced, 0 left
          heads.0.1: ReLU -> SmoothReLU
          heads.1.1: ReLU -> SmoothReLU
        >>> x = torch.randn(5, 6)
        >>> gr.regularizers.DiverseHeads()(smooth, x).backward()
        >>> bool(smooth.base.weight.grad.any())
        True
        >>> with gr.smooth_activations(model, surrogate="second_pass"):
        ...     gr.regularizers.DiverseHeads()(model, x).backward()
        >>> bool(model.base.weight.grad.any()), type(model.heads[0][1]).__name__
        (True, 'ReLU')
    """
    if surrogate not in (None, "second_pass"):
        raise GradregError(f'surrogate={surrogate!r}; allowed are None and "second_pass".')
    if not isinstance(model, nn.Module):
        raise CompatibilityError(f"model is a {type(model).__name__}; smooth_activations needs a torch.nn.Module.")
    scheme = _scheme(beta, surrogate == "second_pass", mapping or {})
    batch = None if batch is None else as_batch(batch)
    if scheme.second_pass:
        return SecondPass(model, scheme, batch)
    if unwrap(model) is not model:
        raise CompatibilityError(
            f"The model is wrapped in {type(model).__name__}, whose copy would be no wrapper of anything. "
            f"Pass model.module, and "
            "wrap the copy."
        )
    swap = Swap(copied(model), scheme)
    swap.apply(batch)
    smooth = swap.model
    vars(smooth)["swaps"] = _said(swap)
    return smooth


def _said(swap: Swap) -> ActivationSwaps:
    found = ActivationSwaps(dict(swap.swapped), dict(swap.left))
    if found.left:
        names = "; ".join(f"{name}: {why}" for name, why in found.left.items())
        warn(f"Some activations could not be replaced. {names}.", GradregWarning)
    return found


def _scheme(beta: float, second_pass: bool, mapping: Mapped) -> Scheme:
    if not isinstance(beta, (int, float)) or not 0 < beta < math.inf:
        raise GradregError(f"beta={beta!r}; it must be a positive number, usually between 1 and 10.")
    if not BETAS[0] <= beta <= BETAS[1]:
        effect = (
            "nearly linear, far from the hinge" if beta < BETAS[0] else "flat again outside a narrow range around it"
        )
        warn(f"With beta={beta:g} the smooth forms are {effect}; between 1 and 10 they are neither.", GradregWarning)
    scheme = Scheme(float(beta), second_pass)
    for key, value in mapping.items():
        if value is not None and second_pass:
            raise GradregError(
                'With surrogate="second_pass" activations stay what they are; mapping may only leave some out (None).'
            )
        if isinstance(key, type) and issubclass(key, nn.Module):
            scheme.modules[key] = None if value is None else _factory(key, value)
        elif key in OF_FUNCTION or callable(key):
            if value is not None and not callable(value):
                raise GradregError(f"mapping[{key!r}] is {value!r}; give a function, or None to leave it.")
            scheme.functions[key] = value
        else:
            known = ", ".join(kind.__name__ for kind in OF_MODULE)
            raise GradregError(
                f"mapping has the key {key!r}; allowed are module classes ({known}, or your own) and functions."
            )
    return scheme


def _factory(key: type[nn.Module], value: Any) -> Callable[[nn.Module], nn.Module]:
    if isinstance(value, nn.Module):
        return lambda old: copied(value)
    if isinstance(value, type) and issubclass(value, nn.Module):
        return lambda old: value()
    if not callable(value):
        raise GradregError(
            f"mapping[{key.__name__}] is {value!r}; give a module class, a module, a function that makes one "
            f"from the old one, or None."
        )

    def make(old: nn.Module) -> nn.Module:
        new = value(old)
        if not isinstance(new, nn.Module):
            raise GradregError(f"mapping[{key.__name__}] made a {type(new).__name__}, not a module.")
        return new

    return make
