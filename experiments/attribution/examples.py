"""How examples of any data become pictures or tokens on a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.experiments.page import Image, Text

__all__ = ["label_of", "main_input", "shown"]

_MOST_NUMBERS = 16


def shown(
    batch: gr.Batch,
    *,
    image_shape: Sequence[int] | None = None,
    decode: Callable[[list[int]], Sequence[str]] | None = None,
    scores: Tensor | None = None,
) -> Image | Text:
    """Return a batch of one example as a picture, as tokens, or as its first numbers.

    Args:
        batch: One example.
        image_shape: Read the input as `[height, width]` or `[channels, height, width]`; None: two axes, or three of which the
            first has one or three entries, are a picture.
        decode: From token ids to texts, one per token; None shows the ids.
        scores: One score per token; NaN for a token without one.

    Raises:
        GradregError: If the input does not have as many numbers as `image_shape`.
    """
    value = main_input(batch)[0].detach().cpu()
    if not value.is_floating_point():
        return _text(batch, value.flatten(), decode, scores)
    if image_shape is not None:
        if value.numel() != torch.Size(image_shape).numel():
            raise GradregError(f"image_shape={list(image_shape)} does not fit inputs of the shape {list(value.shape)}.")
        value = value.reshape(*image_shape)
    if value.dim() == 3 and value.shape[0] in (1, 3):
        value = value[0] if value.shape[0] == 1 else value.permute(1, 2, 0)
    if value.dim() == 2 or (value.dim() == 3 and value.shape[2] == 3):
        return Image(value.float().numpy())
    numbers = [f"{number:.3g}" for number in value.flatten()[:_MOST_NUMBERS].tolist()]
    return Text([*numbers, "..."] if value.numel() > _MOST_NUMBERS else numbers)


def label_of(batch: gr.Batch) -> str:
    """Return the target of a batch of one example in words; nothing if it is no single number."""
    target = batch.targets
    if isinstance(target, Tensor) and target.numel() == 1:
        value = target.item()
        return f"label {value:.4g}" if isinstance(value, float) else f"label {value}"
    return ""


def main_input(batch: gr.Batch) -> Tensor:
    """Return the input that is shown: the token ids, or else the first tensor."""
    named: Mapping[str, Any] = batch.named_inputs()
    if isinstance(named.get("input_ids"), Tensor):
        return named["input_ids"]  # type: ignore[no-any-return]  # a tensor, as was just seen
    return next(value for value in named.values() if isinstance(value, Tensor))


def _text(
    batch: gr.Batch, ids: Tensor, decode: Callable[[list[int]], Sequence[str]] | None, scores: Tensor | None
) -> Text:
    mask = batch.named_inputs().get("attention_mask")
    real = (
        mask[0].bool().cpu()
        if isinstance(mask, Tensor) and mask.shape[1:] == ids.shape
        else torch.ones(len(ids)).bool()
    )
    kept = ids[real].tolist()
    words = list(decode(kept)) if decode is not None else [str(token) for token in kept]
    if len(words) != len(kept):
        raise GradregError(f"decode gives {len(words)} texts for {len(kept)} tokens; expected one per token.")
    if scores is None:
        return Text(words)
    values = [None if score != score else score for score in scores.tolist()]  # NaN alone differs from itself
    return Text(words, [value for value, use in zip(values, real.tolist(), strict=True) if use])
