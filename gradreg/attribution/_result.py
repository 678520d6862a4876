"""What an attribution returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradreg.errors import GradregError

__all__ = ["Attribution"]


@dataclass(frozen=True, eq=False)
class Attribution:
    r"""Scores of sources for targets: how much every token, or every feature, contributed to every output.

    Args:
        by_key: From result key (the module or input that was attributed to) to scores: `[n, *targets, L]` per token, one
            score for each of L positions, `[n, *targets, *shape]` per feature. Units are those of the target.
        method: Name of the function that made it.
        per: `"token"` or `"feature"`.
        change: $f(x) - f(b)$ of every target, `[n, *targets]`; None where there is no baseline.
        delta: The completeness gap, sum of all scores minus `change`, `[n, *targets]`; None where there is no baseline.
        error: Estimated error of the integral, in absolute value, `[n, *targets]`; None where there is none.
        target_axes: A name for every axis of targets, such as `("token", "class")`.
        ids: From key to the token ids `[n, L]`, where sources are tokens.
        valid: From key to which positions are real, `[n, L]`; padded ones have score zero.
        segments: From key to what its tokens are: `"source"`, `"target prefix"`.
        labels: From key to the tokens of every example as text, where they are known.
        provenance: What made it: versions, dtype, kernel, plan, model class, arguments.

    Example:
        >>> import torch, gradreg as gr
        >>> a = gr.Attribution({"inputs": torch.ones(1, 2, 3)}, method="saliency", per="token", target_axes=("class",))
        >>> a.scores.shape
        torch.Size([1, 2, 3])
    """

    by_key: Mapping[str, Tensor]
    method: str
    per: str
    change: Tensor | None = None
    delta: Tensor | None = None
    error: Tensor | None = None
    target_axes: tuple[str, ...] = ()
    ids: Mapping[str, Tensor] = field(default_factory=dict)
    valid: Mapping[str, Tensor] = field(default_factory=dict)
    segments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, list[list[str]]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scores(self) -> Tensor:
        """The scores as one tensor; per token those of several keys one after the other along the last axis.

        Raises:
            GradregError: If scores per feature have several keys; take them from `by_key`.
        """
        values = list(self.by_key.values())
        if len(values) == 1:
            return values[0]
        if self.per != "token":
            raise GradregError(f"The scores have the keys {', '.join(map(repr, self.by_key))}; take by_key[...].")
        return torch.cat(values, -1)
