"""Several heads over one base, and ensembles: ordinary Modules whose forward gives `[n, K, ...]`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from gradreg.errors import GradregWarning, HeadsError, closest, warn
from gradreg.model._call import invoke
from gradreg.model._run_heads import run_heads, tap_of


class SharedBase(nn.Module):
    """Heads over one shared base: `forward` gives `[n, K, ...]` from one pass of the base.

    Equal heads (same structure and settings) run as one vmapped pass over their stacked, live parameters; unequal ones,
    and heads that vmap refuses, run in a loop. Parameters, state dict and optimizer are the ordinary ones of `base` and
    `heads`. A head that changes its input in place changes a copy.

    Args:
        base: Any module.
        heads: Modules, each from features to outputs of one common shape.
        select: Which of several outputs of the base are the features: a position, a name, or a function.

    Raises:
        HeadsError: If there is no head, or what `select` names is not there; when called, if outputs differ in shape.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import gradreg as gr
        >>> model = gr.SharedBase(nn.Linear(8, 4), [nn.Linear(4, 2) for _ in range(3)])
        >>> model(torch.zeros(5, 8)).shape, model.features(torch.zeros(5, 8)).shape
        (torch.Size([5, 3, 2]), torch.Size([5, 4]))
    """

    def __init__(
        self,
        base: nn.Module,
        heads: Iterable[nn.Module],
        select: int | str | Callable[[Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.heads = _module_list(heads, "SharedBase")
        self.select = select

    def features(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the heads read, `[n, ...]`."""
        return self._selected(invoke(self.base, args, kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of all heads, `[n, K, ...]`."""
        tap = tap_of(self)
        given = tap.override.get("features") if tap is not None else None
        features = self.features(*args, **kwargs) if given is None else given
        if tap is not None and tap.shift is not None:
            if tap.shift.shape != features.shape:
                raise HeadsError(
                    f"A direction of the features has shape {tuple(tap.shift.shape)}; the features {tuple(features.shape)}."
                )
            features = features + tap.shift
        return run_heads(self, self.heads, {"features": features}, lambda head, shared: head(shared["features"]), tap)

    def _selected(self, output: Any) -> Tensor:
        if self.select is None:
            chosen = output
        elif callable(self.select):
            chosen = self.select(output)
        else:
            try:
                chosen = output[self.select]
            except (KeyError, IndexError, TypeError) as problem:
                names = closest(str(self.select), output) if isinstance(output, Mapping) else type(output).__name__
                raise HeadsError(f"SharedBase(select={self.select!r}): the base returns {names}.") from problem
        if not isinstance(chosen, Tensor):
            hint = "" if self.select is not None else " Choose with select=<position, name or function>."
            raise HeadsError(f"The features must be one tensor; the base gives a {type(chosen).__name__}.{hint}")
        return chosen

    def extra_repr(self) -> str:
        """Show what is selected."""
        return "" if self.select is None else f"select={self.select!r}"


class Ensemble(nn.Module):
    """Separate models on the same inputs, without a base: `forward` gives `[n, K, ...]`.

    Args:
        models: Modules with outputs of one common shape.

    Raises:
        HeadsError: If there is no model; when called, if outputs differ in shape.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import gradreg as gr
        >>> gr.Ensemble([nn.Linear(8, 2), nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))])(torch.zeros(5, 8)).shape
        torch.Size([5, 2, 2])
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = _module_list(models, "Ensemble")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of all models, `[n, K, ...]`."""
        tap = tap_of(self)
        names = tap.argument_names if tap is not None else ()
        names = names if len(names) == len(args) else tuple(str(position) for position in range(len(args)))
        shared = {**dict(zip(names, args, strict=True)), **kwargs}

        def apply(model: nn.Module, values: Mapping[str, Any]) -> Any:
            return invoke(model, tuple(values[name] for name in names), {name: values[name] for name in kwargs})

        return run_heads(self, self.models, shared, apply, tap)


def _module_list(modules: Any, owner: str) -> nn.ModuleList:
    if isinstance(modules, nn.Module) and not isinstance(modules, (nn.ModuleList, nn.Sequential)):
        raise HeadsError(
            f"{owner} needs a list of modules, found one {type(modules).__name__}; for one head give [head]."
        )
    items = list(modules)
    if not items:
        raise HeadsError(f"{owner} needs at least one head; the list is empty.")
    for position, item in enumerate(items):
        if not isinstance(item, nn.Module):
            raise HeadsError(f"Head {position} of {owner} is a {type(item).__name__}, not a torch.nn.Module.")
    if len({id(item) for item in items}) < len(items):
        warn(
            f"{owner} was given the same module more than once: such heads share all parameters and can never differ. Make them "
            "apart, for example [make_head() for _ in range(K)].",
            GradregWarning,
        )
    return modules if isinstance(modules, nn.ModuleList) else nn.ModuleList(items)
