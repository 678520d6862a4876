"""What is attributed to: values in the plain forward, which positions are real, and which tokens they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import PointTensor, point_tensors
from gradreg.errors import GradregError
from gradreg.model import MAP_SUFFIX, unwrap
from gradreg.wrt import Wrt

__all__ = ["Sources", "chosen_per", "read_sources"]


@dataclass(frozen=True)
class Sources:
    """Points of one forward.

    Attributes:
        values: From key to `[n, *shape]`.
        ids: From key to token ids `[n, L]`, where positions are tokens.
        valid: From key to which positions are real, `[n, L]`; only where the batch has a mask of that shape.
        segments: From key to `"source"` or `"target prefix"`, where positions are tokens.
    """

    values: dict[str, Tensor]
    ids: dict[str, Tensor]
    valid: dict[str, Tensor]
    segments: dict[str, str]

    def where_real(self, key: str, tensor: Tensor) -> Tensor:
        """Return a tensor `[..., n, *shape]` with the value itself at padded positions, which are never moved."""
        if key not in self.valid:
            return tensor
        value, valid = self.values[key], self.valid[key]
        return torch.where(valid.reshape(*valid.shape, *[1] * (value.dim() - 2)), tensor, value)


def read_sources(model: nn.Module, batch: Batch, wrt: Wrt | tuple[Wrt, ...], *, differentiable: bool) -> Sources:
    """Run the model once and read the points.

    Args:
        model: Any module.
        batch: The batch.
        wrt: Which points.
        differentiable: Whether values keep their graph.
    """
    points = point_tensors(model, batch, wrt, differentiable=differentiable)
    named = batch.named_inputs()
    encoder_decoder = bool(getattr(getattr(unwrap(model), "config", None), "is_encoder_decoder", False))
    found = Sources({}, {}, {}, {})
    for key, point in points.items():
        found.values[key] = point.value
        if not _along_tokens(key, point.value, named):
            continue
        shape = point.value.shape[:2]
        prefix = encoder_decoder and _is_prefix(key, point, named)
        for ids in (point.source, named.get("decoder_input_ids" if prefix else "input_ids")):
            if _fits(ids, shape) and not ids.is_floating_point():
                found.ids[key] = ids.detach()
                found.segments[key] = "target prefix" if prefix else "source"
                break
        mask = named.get("decoder_attention_mask" if prefix else "attention_mask")
        if _fits(mask, shape):
            found.valid[key] = mask.bool()
    return found


def _along_tokens(key: str, value: Tensor, inputs: Mapping[str, object]) -> bool:
    """Whether the second axis may be that of tokens: not the heads of a map, nor the width of a vector, if as many as tokens."""
    if key.partition("#")[0].endswith(MAP_SUFFIX):
        return False
    return key in inputs or value.dim() == 3 or (value.dim() > 3 and value.shape[1] not in value.shape[2:])


def _is_prefix(key: str, point: PointTensor, inputs: Mapping[str, object]) -> bool:
    """Whether the tokens of a point of an encoder-decoder are those that the decoder reads."""
    parts = key.partition("#")[0].split(".")
    if "decoder" in parts or key.endswith("#1"):  # one embedding for both sides is called for the encoder first
        return True
    if "encoder" in parts or key.endswith("#0"):
        return False
    reads_ids = point.source is not None and not point.source.is_floating_point()
    return not reads_ids or "encoder_outputs" in inputs  # what stands outside of both is behind the decoder


def _fits(given: object, shape: torch.Size) -> TypeGuard[Tensor]:
    return isinstance(given, Tensor) and given.dim() == 2 and given.shape == shape


def chosen_per(per: str, values: Mapping[str, Tensor]) -> str:
    """Return the units of scores: `"token"` or `"feature"`, for `"auto"` by the shape of what is attributed to.

    Positions with at most one axis of features behind them, `[n, L]` and `[n, L, d]`, are tokens; pictures and attention maps
    are not.

    Raises:
        GradregError: If `per` is unknown, or tokens are asked of a value without an axis of positions.
    """
    if per not in ("auto", "token", "feature"):
        raise GradregError(
            f"per={per!r}; allowed are 'token' (positions along the second axis), 'feature', and 'auto' (by the shape)."
        )
    if per == "auto":
        return "token" if all(2 <= value.dim() <= 3 for value in values.values()) else "feature"
    for key, value in values.items():
        if per == "token" and value.dim() < 2:
            raise GradregError(
                f"per='token' needs positions along the second axis, but {key!r} has shape {tuple(value.shape)}; use "
                "per='feature'."
            )
    return per
