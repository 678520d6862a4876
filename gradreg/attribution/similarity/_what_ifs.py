"""Named changes of the token weights and of the groups; every cosine follows from the Gram matrices alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradreg.attribution.similarity._calibration import AS_GIVEN, NO_END, NO_SPECIAL
from gradreg.attribution.similarity._groups import EMBEDDINGS, NORMS
from gradreg.attribution.similarity._rows import Cell, TokenRow, WhatIf
from gradreg.attribution.similarity._texts import shown

NEW, PREFIX, UNIT, PROMPT = "without the new tokens", "shared prefix only", "unit-normalized tokens", "prompt masked"
NO_EMBEDDINGS, NO_NORMS = "without embeddings and LM head", "without norms"

# which tokens to leave out
_DROPPED: dict[str, Callable[[TokenRow], bool]] = {
    NO_END: lambda token: token.end,
    NO_SPECIAL: lambda token: token.special,
    NEW: lambda token: token.new,
    PREFIX: lambda token: not token.shared,
    PROMPT: lambda token: token.prompt,
}
_TEXTS = {
    NO_END: "tokens that end a sequence",
    NO_SPECIAL: "all special tokens",
    NEW: "tokens without a counterpart in the other example",
    PREFIX: "all from the first difference on",
    PROMPT: "tokens of the prompt",
    UNIT: "every token gradient divided by its norm",
    NO_EMBEDDINGS: "parameters of embeddings and of the head over the vocabulary",
    NO_NORMS: "parameters of normalization layers",
}


@dataclass(frozen=True)
class Sums:
    """The three inner products that a cosine is made of."""

    aa: float
    ab: float
    bb: float

    @property
    def cosine(self) -> float | None:
        """The cosine; None where a side is zero."""
        return self.ab / (self.aa**0.5 * self.bb**0.5) if self.aa > 0 and self.bb > 0 else None


def weighted_sums(gram: Tensor, weights_a: Tensor, weights_b: Tensor) -> Sums:
    r"""Return $w_a^\top G w_a$, $w_a^\top G w_b$ and $w_b^\top G w_b$, G over the tokens of a, then of b."""
    n = len(weights_a)
    left, right = gram[:n], gram[n:]
    return Sums(
        float(weights_a @ left[:, :n] @ weights_a),
        float(weights_a @ left[:, n:] @ weights_b),
        float(weights_b @ right[:, n:] @ weights_b),
    )


def what_ifs(cells: Sequence[Cell], a: Sequence[TokenRow], b: Sequence[TokenRow]) -> dict[str, WhatIf]:
    """Return all changes that apply, the cosine as given first."""
    gram = torch.stack([cell.gram for cell in cells]).sum(0)
    ones = torch.ones(len(a), dtype=torch.float64), torch.ones(len(b), dtype=torch.float64)
    as_given = weighted_sums(gram, *ones)
    found = {AS_GIVEN: WhatIf(as_given.cosine, as_given.ab)}
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for name, drops in _DROPPED.items():
        dropped = tuple(tuple(i for i, token in enumerate(side) if drops(token)) for side in (a, b))
        everything = tuple(tuple(range(len(side))) for side in (a, b))
        nothing_shared = name == PREFIX and dropped == everything
        if not any(dropped) or nothing_shared or (name in (NO_SPECIAL, PREFIX) and dropped in seen):
            continue
        seen.add(dropped)
        kept = weights_without(a, drops), weights_without(b, drops)
        sums = weighted_sums(gram, *kept)
        texts = [tuple(shown(side[i].text) for i in places) for side, places in zip((a, b), dropped, strict=True)]
        found[name] = WhatIf(sums.cosine, sums.ab, texts[0], texts[1], _TEXTS[name])
    if len(a) > 1 or len(b) > 1:
        norms = gram.diagonal().clamp(min=0).sqrt()
        inverse = torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))
        sums = weighted_sums(gram, inverse[: len(a)], inverse[len(a) :])
        found[UNIT] = WhatIf(sums.cosine, sums.ab, text=_TEXTS[UNIT])
    for name, kind in ((NO_EMBEDDINGS, EMBEDDINGS), (NO_NORMS, NORMS)):
        rest = [cell.gram for cell in cells if cell.kind != kind]
        if rest and len(rest) < len(cells):
            sums = weighted_sums(torch.stack(rest).sum(0), *ones)
            found[name] = WhatIf(sums.cosine, sums.ab, text=_TEXTS[name])
    return found


def weights_without(tokens: Sequence[TokenRow], drops: Callable[[TokenRow], bool]) -> Tensor:
    """Return 1 for the tokens that stay."""
    return torch.tensor([0.0 if drops(token) else 1.0 for token in tokens], dtype=torch.float64)


def dropped_weights(key: str, tokens: Sequence[TokenRow]) -> Tensor:
    """Return the weights of a named change that leaves tokens out."""
    return weights_without(tokens, _DROPPED.get(key, lambda token: False))
