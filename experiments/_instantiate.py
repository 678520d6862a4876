"""The only place where configurations become objects."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.utils import instantiate

from gradreg.experiments.locate import ALLOWED

__all__ = ["build"]

_TAKES_WHITELIST = "_execution_whitelist_" in inspect.signature(instantiate).parameters  # Hydra 1.4 and later


def build(node: Mapping[str, Any], **supplied: Any) -> Any:
    """Build the object that a configuration node describes.

    Call it on validated configurations only: `validate.check` decides which `_target_`s are allowed. Hydra's own whitelist
    gets whole packages, because it looks at where results are defined, not only at how targets are named.

    Args:
        node: A mapping with `_target_`; with `_partial_: true` the object is completed by `supplied`.
        **supplied: Arguments that only the program knows, such as the parameters of an optimizer.

    Returns:
        The object; lists and mappings reach it as plain Python ones.
    """
    options = {"_execution_whitelist_": _packages(node)} if _TAKES_WHITELIST else {}
    built = instantiate(node, _convert_="all", **options)
    return built(**supplied) if node.get("_partial_") else built


def _packages(node: Mapping[str, Any]) -> list[str]:
    return sorted({f"{prefix}*" for prefix in ALLOWED} | {f"{name.split('.')[0]}.*" for name in _targets(node)})


def _targets(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield str(value["_target_"])
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _targets(item)
