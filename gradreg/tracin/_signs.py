"""Random signs and places from a counter: any part of a huge matrix, alone, and the same on every machine."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def stream_key(seed: int, *labels: object) -> int:
    """Return the 64-bit key of a stream of numbers, from a seed and what the stream is for."""
    text = "\x1f".join([str(seed), *(str(label) for label in labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def words(key: int, start: int, count: int) -> np.ndarray:
    """Return the words `start ... start + count - 1` of a stream, 64 random bits each.

    SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): a bijection of the counter, in
    integer arithmetic alone, so no machine, library version or number of threads changes it.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        state = np.arange(start + 1, start + count + 1, dtype=np.uint64) * _GAMMA + np.uint64(key)
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
        mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed


def sign_matrix(key: int, start: int, stop: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows `start ... stop - 1` of an endless matrix of independent signs, `[stop - start, size]` of -1 and 1."""
    per_row = -(-size // 64)
    found = words(key, start * per_row, (stop - start) * per_row).astype("<u8")
    bits = np.unpackbits(found.view(np.uint8).reshape(stop - start, per_row * 8), axis=1, count=size, bitorder="little")
    return torch.from_numpy(bits).to(dtype).mul_(2).sub_(1)


def places(key: int, start: int, stop: int, size: int, nonzeros: int) -> tuple[Tensor, Tensor]:
    """Return, for coordinates `start ... stop - 1`, where each goes and with which sign: `[stop - start, nonzeros]` both.

    The `size` places are cut into `nonzeros` blocks and a coordinate gets one place in each, so its places differ.
    """
    found = words(key, start * nonzeros, (stop - start) * nonzeros).reshape(stop - start, nonzeros)
    edges = np.linspace(0, size, nonzeros + 1).astype(np.uint64)
    widths = edges[1:] - edges[:-1]
    # the top 32 bits, scaled to the width: the excess of a place is below size / 2**32
    where = edges[:-1] + (((found >> np.uint64(32)) * widths) >> np.uint64(32))
    signs = (found & np.uint64(1)).astype(np.float32) * 2 - 1
    return torch.from_numpy(where.astype(np.int64)), torch.from_numpy(signs)
