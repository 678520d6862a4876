"""Where a path to the input starts: tokens, mean embeddings, tensors, several of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gradreg.attribution._sources import Sources
from gradreg.batch import Batch
from gradreg.errors import BatchError, GradregError, UnknownNameError, closest
from gradreg.model import unwrap, with_decoder_inputs

__all__ = [
    "Baseline",
    "BaselineLike",
    "MeanEmbedding",
    "TokenBaseline",
    "mean_embedding",
    "starts_of",
    "token_baseline",
]

Read: TypeAlias = Callable[[Batch], Sources]

CHOICES = (
    "give one explicitly: token_baseline(id) for the vectors of a pad, mask or other token; mean_embedding(); a tensor or "
    "number, or a mapping from result key to these; or a list of several, which are averaged over"
)


class Baseline(ABC):
    """A baseline that is worked out from the model and the batch."""

    @abstractmethod
    def values(self, model: nn.Module, batch: Batch, sources: Sources, read: Read) -> dict[str, Tensor]:
        """Return `[n, *shape]`, or what broadcasts to it, for every key.

        Args:
            model: The model without wrappers.
            batch: The batch that is attributed.
            sources: Its values.
            read: Gives the values for another batch.
        """


@dataclass(frozen=True)
class TokenBaseline(Baseline):
    """See `token_baseline`."""

    id: int
    keep: tuple[int, ...] = ()

    def values(self, model: nn.Module, batch: Batch, sources: Sources, read: Read) -> dict[str, Tensor]:
        """Return the values in a forward on the replaced ids."""
        batch = with_decoder_inputs(model, batch)
        named = batch.named_inputs()
        known: list[str] = [name for name in ("input_ids", "decoder_input_ids") if name in named]
        names = known or [name for name, value in named.items() if isinstance(value, Tensor) and _is_ids(value)]
        if not names:
            raise BatchError(f"token_baseline({self.id}) replaces token ids, but the inputs {sorted(named)} hold none.")
        changed = {name: self._replaced(named[name]) for name in names if isinstance(named[name], Tensor)}
        try:
            return read(batch.with_inputs(changed)).values
        except BatchError as problem:  # the ids of the caller were read before
            raise BatchError(f"{self!r}: {problem}") from problem

    def _replaced(self, ids: Tensor) -> Tensor:
        kept = torch.isin(ids, torch.tensor(self.keep, dtype=ids.dtype, device=ids.device))
        return torch.where(kept, ids, torch.full_like(ids, self.id))


@dataclass(frozen=True)
class MeanEmbedding(Baseline):
    """See `mean_embedding`."""

    def values(self, model: nn.Module, batch: Batch, sources: Sources, read: Read) -> dict[str, Tensor]:
        """Return the mean output of the embedding of every key over its vocabulary."""
        modules = dict(model.named_modules(remove_duplicate=False))
        found = {}
        for key, value in sources.values.items():
            module = modules.get(key.partition("#")[0])
            weight = getattr(module, "weight", None)
            if not isinstance(module, nn.Module) or key not in sources.ids or not isinstance(weight, Tensor):
                raise GradregError(
                    f"mean_embedding() is for embeddings of tokens, wrt=Embeddings(); {key!r} is none. Use a tensor."
                )
            vocabulary = torch.arange(len(weight), device=weight.device).unsqueeze(0)
            with torch.set_grad_enabled(value.requires_grad):
                found[key] = module(vocabulary).mean((0, 1))  # through the module: some scale what they look up
        return found


BaselineLike: TypeAlias = (
    "Baseline | Tensor | float | Mapping[str, Baseline | Tensor | float] | list[object] | tuple[object, ...]"
)


def token_baseline(id: int, *, keep: tuple[int, ...] | list[int] = ()) -> TokenBaseline:
    """The values that inputs, embeddings or activations have when every token is replaced by one, such as pad or mask.

    Args:
        id: The token that stands in, for example `tokenizer.pad_token_id` or `tokenizer.mask_token_id`.
        keep: Ids that stay, such as those of special tokens: their positions then get score zero.

    Raises:
        GradregError: If an id is no integer from 0.

    Example:
        >>> import gradreg as gr
        >>> gr.token_baseline(0, keep=(101, 102))
        TokenBaseline(id=0, keep=(101, 102))
    """
    if not isinstance(keep, (tuple, list)):
        raise GradregError(f"token_baseline(keep={keep!r}); allowed is a tuple of token ids.")
    for value in (id, *keep):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise GradregError(f"token_baseline(): a token id is an integer from 0, found {value!r}.")
    return TokenBaseline(id, tuple(keep))


def mean_embedding() -> MeanEmbedding:
    """The mean of all vectors of the vocabulary, at every position, as a baseline for `Embeddings()`.

    Raises:
        GradregError: When used on anything but embeddings of tokens.

    Example:
        >>> import gradreg as gr
        >>> gr.mean_embedding()
        MeanEmbedding()
    """
    return MeanEmbedding()


def starts_of(
    baseline: object, model: nn.Module, batch: Batch, sources: Sources, read: Read
) -> tuple[dict[str, Tensor], int]:
    """Return baselines as `[K, n, *shape]` per key, equal to the values at padded positions, and their number K.

    Args:
        baseline: One of `BaselineLike`.
        model: The model.
        batch: The batch.
        sources: Its values.
        read: Gives the values for another batch.

    Raises:
        GradregError: If there is none, or it does not fit.
    """
    if baseline is None:
        raise GradregError(f"A baseline is needed, and none is right for every model; {CHOICES}.")
    several = list(baseline) if isinstance(baseline, (list, tuple)) else [baseline]
    if not several:
        raise GradregError(f"baseline is an empty {type(baseline).__name__}; {CHOICES}.")
    each = [_one(item, unwrap(model), batch, sources, read) for item in several]
    starts = {key: torch.stack([own[key] for own in each]) for key in sources.values}
    return {key: sources.where_real(key, start) for key, start in starts.items()}, len(several)


def described(baseline: object) -> str:
    """Return a short text for the provenance: tensors by their shapes."""
    if isinstance(baseline, Tensor):
        return f"tensor {tuple(baseline.shape)}"
    if isinstance(baseline, Mapping):
        return "{" + ", ".join(f"{key!r}: {described(item)}" for key, item in baseline.items()) + "}"
    if isinstance(baseline, (list, tuple)):
        return "[" + ", ".join(map(described, baseline)) + "]"
    return repr(baseline)


def _one(baseline: object, model: nn.Module, batch: Batch, sources: Sources, read: Read) -> dict[str, Tensor]:
    if isinstance(baseline, Baseline):
        given: dict[str, object] = dict(baseline.values(model, batch, sources, read))
    elif isinstance(baseline, Mapping):
        given = {}
        for key, item in baseline.items():
            given[key] = item.values(model, batch, sources, read).get(key) if isinstance(item, Baseline) else item
    else:
        given = dict.fromkeys(sources.values, baseline)
        if isinstance(baseline, Tensor) and len(given) > 1:
            raise GradregError(f"baseline is one tensor but there are the keys {closest('', given)}; give a mapping.")
    found = {}
    for key in given:
        if key not in sources.values:
            raise UnknownNameError(
                f"The baseline holds {key!r}, which is not among wrt; allowed are {closest(key, sources.values)}."
            )
    for key, value in sources.values.items():
        if key not in given:
            raise GradregError(f"The baseline lacks {key!r}: one path moves all keys together.")
        found[key] = _fitted(key, given[key], value)
    return found


def _fitted(key: str, given: object, value: Tensor) -> Tensor:
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        given = torch.tensor(float(given), dtype=torch.float64)
    if not isinstance(given, Tensor) or not given.is_floating_point():
        kind = str(given.dtype) if isinstance(given, Tensor) else type(given).__name__
        raise GradregError(f"The baseline of {key!r} is {kind}; {CHOICES}.")
    try:
        fits = torch.broadcast_shapes(given.shape, value.shape) == value.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise GradregError(
            f"The baseline of {key!r} has shape {tuple(given.shape)}; expected {tuple(value.shape)} or what broadcasts to it."
        )
    check_finite(f"The baseline of {key!r}", given)
    return given.to(value).expand(value.shape)


def check_finite(what: str, given: Tensor) -> None:
    """Refuse numbers that no path can start at.

    Raises:
        GradregError: If there is one that is NaN or infinite, or none at all.
    """
    if given.is_meta:
        raise GradregError(f"{what} is on the device 'meta', which holds shapes and no numbers.")
    if not bool(given.isfinite().all()):
        raise GradregError(
            f"{what} holds {float(given[~given.isfinite()][0])}; scores would be NaN. Give finite numbers."
        )


def _is_ids(value: Tensor) -> bool:
    return value.dim() == 2 and not value.is_floating_point() and value.dtype != torch.bool
