"""What a report was made with."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradreg.attribution._versions import version_of
from gradreg.attribution.similarity._example import Example
from gradreg.model import parameter_aliases
from gradreg.scalars import ScalarFunction
from gradreg.scalars._loss import Loss


def provenance_of(
    inner: nn.Module,
    a: Example,
    parameters: dict[str, nn.Parameter],
    rule: str,
    params: str | tuple[str, ...],
    routes: dict[str, str],
) -> dict[str, Any]:
    config = getattr(inner, "config", None)
    counts: dict[str, int] = {}
    for route in routes.values():
        counts[route] = counts.get(route, 0) + 1
    versions = {package: version_of(package) for package in ("gradreg", "torch", "transformers")}
    numel = sum(parameter.numel() for parameter in parameters.values())
    return {
        "model": f"{type(inner).__name__}, {numel:,} parameters",
        "dtype": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()})),
        "attention": str(getattr(config, "_attn_implementation", None) or "as in the model"),
        "of": _described(a.of),
        "params": [params] if isinstance(params, str) else list(params),
        "group_rule": rule,
        "gradient_rules": counts,
        "tied": {
            name: [other for other, first in parameter_aliases(inner).items() if first == name and other != name]
            for name in parameters
            if sum(first == name for first in parameter_aliases(inner).values()) > 1
        },
        "versions": {package: version for package, version in versions.items() if version is not None},
    }


def _described(of: ScalarFunction) -> str:
    """Return a scalar without addresses in memory."""
    if isinstance(of, Loss):
        function: Any = of.function
        for attribute in ("function", "source", "func"):
            function = getattr(function, attribute, function)
        name = getattr(function, "__name__", type(function).__name__)
        shift = ", labels one position later" if of.shift is True else ""
        return f"{name} per {'token' if of.per_token else 'example'}{shift}"
    return getattr(of, "__qualname__", None) or type(of).__qualname__
