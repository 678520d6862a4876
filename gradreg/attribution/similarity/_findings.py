"""The numbers of the report, all from the Gram matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradreg.attribution.similarity._calibration import Calibration
from gradreg.attribution.similarity._rows import Cell, Divergence, GroupRow, TokenRow, WhatIf
from gradreg.attribution.similarity._what_ifs import weighted_sums, what_ifs
from gradreg.errors import GradregError, UnknownNameError, closest


@dataclass(frozen=True, eq=False)
class Findings:
    """What `SimilarityReport` holds, without its words."""

    tokens_a: tuple[TokenRow, ...]
    tokens_b: tuple[TokenRow, ...]
    cells: tuple[Cell, ...]
    divergence: Divergence | None = None
    calibration: Calibration | None = None
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def gram(self) -> Tensor:
        """The Gram matrix of all parameters, over the tokens of a, then of b."""
        return torch.stack([cell.gram for cell in self.cells]).sum(0)

    @cached_property
    def dot(self) -> float:
        """The inner product of the gradients of a and b, sums over their tokens."""
        return float(self._between.sum())

    @cached_property
    def norm_a(self) -> float:
        """The norm of the gradient of a."""
        n = len(self.tokens_a)
        return math.sqrt(float(self.gram[:n, :n].sum()))

    @cached_property
    def norm_b(self) -> float:
        """The norm of the gradient of b."""
        n = len(self.tokens_a)
        return math.sqrt(float(self.gram[n:, n:].sum()))

    @property
    def cosine(self) -> float:
        """The cosine of the two gradients."""
        return self.dot / (self.norm_a * self.norm_b)

    @property
    def token_pairs(self) -> Tensor:
        r"""What every pair of tokens adds to the cosine, $g_i \cdot h_j / (|G| |H|)$, `[tokens_a, tokens_b]`."""
        return self._between / (self.norm_a * self.norm_b)

    @property
    def _between(self) -> Tensor:
        n = len(self.tokens_a)
        return self.gram[:n, n:]

    @cached_property
    def groups(self) -> tuple[GroupRow, ...]:
        """Shares, cosines and contributions of the groups of parameters."""
        rows = []
        ones = torch.ones(len(self.tokens_a), dtype=torch.float64), torch.ones(len(self.tokens_b), dtype=torch.float64)
        for name in dict.fromkeys(cell.group for cell in self.cells):
            own = [cell for cell in self.cells if cell.group == name]
            sums = weighted_sums(torch.stack([cell.gram for cell in own]).sum(0), *ones)
            rows.append(
                GroupRow(
                    name,
                    tuple(parameter for cell in own for parameter in cell.parameters),
                    sum(cell.numel for cell in own),
                    sums.aa / self.norm_a**2,
                    sums.bb / self.norm_b**2,
                    sums.cosine,
                    sums.ab / (self.norm_a * self.norm_b),
                )
            )
        return tuple(rows)

    @cached_property
    def what_ifs(self) -> dict[str, WhatIf]:
        """The cosine after every named change that applies, `"as given"` first."""
        return what_ifs(self.cells, self.tokens_a, self.tokens_b)

    def what_if(
        self,
        weights_a: Sequence[float] | Tensor | None = None,
        weights_b: Sequence[float] | Tensor | None = None,
        groups: Sequence[str] | None = None,
    ) -> WhatIf:
        """Return the cosine under token weights of your own, of some groups only; no backward is run.

        Args:
            weights_a: A weight per token of a; None for ones.
            weights_b: A weight per token of b.
            groups: Names of groups; None for all.

        Raises:
            GradregError: If weights do not fit the tokens, or there is no such group.
        """
        known = {cell.group for cell in self.cells}
        for name in groups or ():
            if name not in known:
                raise UnknownNameError(f"There is no group {name!r}; there are {closest(name, known)}.")
        chosen = [cell.gram for cell in self.cells if groups is None or cell.group in groups]
        if not chosen:
            raise GradregError("groups is empty; name at least one, or None for all.")
        weights = [
            _weights(given, tokens, name)
            for given, tokens, name in (
                (weights_a, self.tokens_a, "weights_a"),
                (weights_b, self.tokens_b, "weights_b"),
            )
        ]
        sums = weighted_sums(torch.stack(chosen).sum(0), *weights)
        return WhatIf(sums.cosine, sums.ab, text="own weights")


def _weights(given: Sequence[float] | Tensor | None, tokens: Sequence[TokenRow], name: str) -> Tensor:
    if given is None:
        return torch.ones(len(tokens), dtype=torch.float64)
    try:
        found = torch.as_tensor(given).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise GradregError(
            f"{name}={given!r} are no weights; give a number for each of {len(tokens)} tokens."
        ) from problem
    if found.shape != (len(tokens),):
        raise GradregError(f"{name} has shape {tuple(found.shape)}; there are {len(tokens)} tokens.")
    return found
