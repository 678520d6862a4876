"""A content hash of an example that does not depend on how it is batched or padded."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradreg.batch import Batch, map_tensors

__all__ = ["content_hash"]


def content_hash(sample: Any) -> int:
    """Return 64 bits that tell examples apart: tensors and arrays by dtype, shape and bytes, containers by their parts.

    Example:
        >>> import torch
        >>> from gradreg.tracin._hash import content_hash
        >>> content_hash((torch.ones(2), 1)) == content_hash((torch.ones(2), 1)) != content_hash((torch.ones(2), 2))
        True
    """
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, sample)
    return int.from_bytes(digest.digest(), "little")


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(f"t{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy() if value.numel() else b"")
    elif isinstance(value, (np.ndarray, np.generic)):
        digest.update(f"a{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"m{len(value)}".encode())
        for name in sorted(value, key=str):
            digest.update(f"k{name}".encode())
            _feed(digest, value[name])
    elif isinstance(value, (tuple, list)):
        digest.update(f"s{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, Batch):
        _feed(digest, _as_row(value))
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        digest.update(f"{type(value).__name__}{value!r}".encode())
    elif hasattr(value, "__array__"):  # images
        _feed(digest, np.asarray(value))
    else:
        digest.update(pickle.dumps(value))


def _as_row(batch: Batch) -> Any:
    """Return the row that a batch of one example stands for, as a dataset of pairs would give it."""
    rest = [batch.groups, dict(batch.extras)] if batch.groups is not None or batch.extras else []
    parts = [batch.inputs, *([batch.targets] if batch.targets is not None or rest else []), *rest]
    row = map_tensors(lambda tensor: tensor[0], tuple(parts))
    return row[0] if len(parts) == 1 else row
