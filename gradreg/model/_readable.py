"""What a model of tokens can read: told before it runs where that is certain, and after it failed where that is why."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.errors import BatchError, CompatibilityError
from gradreg.model._embeddings import input_tables
from gradreg.model._walk import walk

__all__ = ["check_readable", "longest_text", "unreadable"]

_IDS = ("input_ids", "decoder_input_ids")

# What torch says of an embedding, and of an index into a tensor; all else is an error of the model's own code
_LOOKED_UP = re.compile(r"out of (range in self|bounds for dimension)")


def check_readable(model: nn.Module, batch: Batch, where: str = "batch") -> None:
    """Refuse batches that no forward of the model can read, before one is tried.

    Args:
        model: The model without wrappers.
        batch: The batch.
        where: What the caller calls it.

    Raises:
        BatchError: If a tensor holds no numbers, a name is nearly an argument's, or token ids are no integers, of no such
            shape or outside the vocabulary, or their mask is of another shape.
        CompatibilityError: If the weights hold no numbers.
    """
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.is_meta:
        raise CompatibilityError(
            f"The weights of {type(model).__name__} are on the device 'meta', which holds shapes and no numbers. Load them first."
        )
    named = batch.named_inputs()
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        if value.is_meta:
            raise BatchError(f"{where}[{name!r}] is on the device 'meta', which holds shapes and no numbers.")
    if not any(name in tensors for name in _IDS) or any(_transformed(value) for value in tensors.values()):
        return
    _check_spelling(model, named, where)
    tables = input_tables(model)
    for name, table in zip(_IDS, (tables * 2)[:2] if tables else (), strict=False):
        if name in tensors:
            _check_shape(named, name, where)
            # beside pictures or sounds an id outside of the table may stand for one
            if not any(value.is_floating_point() and value.dim() > 2 for value in tensors.values()):
                _check_vocabulary(tensors[name], table, f"{where}[{name!r}]", model)


def _check_spelling(model: nn.Module, named: Mapping[str, Any], where: str) -> None:
    """Refuse names that are nearly those of arguments: models of transformers swallow any name, and a mask would be lost."""
    known = inspect.signature(model.forward).parameters
    if not any(argument.kind is argument.VAR_KEYWORD for argument in known.values()):
        return  # the call itself refuses them
    for name in named:
        near = [] if name in known else difflib.get_close_matches(name, known.keys() - named.keys(), 1, 0.85)
        if near:
            raise BatchError(
                f"{where} has an input {name!r}, which {type(model).__name__} does not take and would ignore. Is {near[0]!r} "
                "meant?"
            )


def unreadable(model: nn.Module, batch: Batch, problem: Exception) -> BatchError | None:
    """Return why a forward failed, where the batch tells it.

    Args:
        model: The model without wrappers.
        batch: What it was given.
        problem: What it raised.
    """
    tensors = [value for value in batch.named_inputs().values() if isinstance(value, Tensor)]
    if any(map(_transformed, tensors)) or isinstance(problem, torch.OutOfMemoryError):
        return None
    kind = type(model).__name__
    ids = [
        value for value in tensors if not value.is_floating_point() and value.dtype != torch.bool and value.dim() > 1
    ]
    longest = max((value.shape[1] for value in ids), default=0)
    limit = longest_text(model)
    if limit is not None and longest > limit:
        return BatchError(
            f"The batch has texts of {longest} tokens, and {kind} has positions for {limit}. Cut them: "
            f"tokenizer(texts, truncation=True, max_length={limit})."
        )
    tables = [module for _, module in walk(model) if isinstance(module, nn.Embedding)]
    if isinstance(problem, IndexError) and _LOOKED_UP.search(str(problem)) and ids and tables:
        least, most = min(int(value.min()) for value in ids), max(int(value.max()) for value in ids)
        sizes = ", ".join(str(size) for size in dict.fromkeys(table.num_embeddings for table in tables))
        return BatchError(
            f"{kind} cannot look up the batch ({problem}): its integers go from {least} to {most}, and the tables of {kind} have "
            f"{sizes} rows, counted from 0. Are they ids of another tokenizer, or texts that are too long?"
        )
    mask = batch.named_inputs().get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() not in (2, 4):
        return BatchError(
            f"{kind} cannot read attention_mask {tuple(mask.shape)} ({problem}); most models take [n, L], 1 for tokens and 0 for "
            "padding, or [n, 1, queries, keys]."
        )
    return None


def _check_shape(named: dict[str, Any], name: str, where: str) -> None:
    ids, mask = named[name], named.get("decoder_attention_mask" if name.startswith("decoder") else "attention_mask")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise BatchError(f"{where}[{name!r}] is {ids.dtype}; token ids are integers, torch.long.")
    if ids.dim() < 2 or ids.shape[-1] == 0:
        raise BatchError(
            f"{where}[{name!r}] has shape {tuple(ids.shape)}; expected [n, L], n texts of at least one token. For a single text "
            "add the axis: ids[None]."
        )
    if isinstance(mask, Tensor) and mask.dim() == ids.dim() == 2 and mask.shape != ids.shape:
        raise BatchError(
            f"The mask of {where}[{name!r}] has shape {tuple(mask.shape)}, the ids {tuple(ids.shape)}: it says of every token "
            "whether it is one (1) or padding (0)."
        )


def _check_vocabulary(ids: Tensor, table: nn.Module, where: str, model: nn.Module) -> None:
    known = getattr(table, "num_embeddings", None)
    if not isinstance(known, int):
        return
    outside = (ids < 0) | (ids >= known)
    if bool(outside.any()):
        raise BatchError(
            f"{where} holds the token {int(ids[outside][0])}, but {type(model).__name__} knows {known} tokens "
            f"(0 to {known - 1}). The tokenizer does not belong to the model, or tokens were added without "
            "model.resize_token_embeddings(len(tokenizer))."
        )


def longest_text(model: nn.Module) -> int | None:
    """Return how many tokens have a position, as the configuration says; tables that leave out padding have fewer."""
    for _, module in walk(model):
        found = getattr(getattr(module, "config", None), "max_position_embeddings", None)
        if isinstance(found, int) and found > 0:
            table = next((own for path, own in walk(model) if path.endswith("position_embeddings")), None)
            padding = getattr(table, "padding_idx", None)
            return found if padding is None else found - padding - 1
    return None


def _transformed(value: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(value)
