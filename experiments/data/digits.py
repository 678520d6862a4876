"""Collages of the 8x8 digits that come with scikit-learn: real images, nothing to download."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

import gradreg as gr
from gradreg.experiments.data.splits import IN_DISTRIBUTION, Data, DataError, batch_of

__all__ = ["DigitCollages", "digit_pools"]

_SHARES = {"train": (0.0, 0.5), "validation": (0.5, 0.7), "test": (0.7, 1.0)}  # of the source images, disjoint


def digit_pools(seed: int) -> tuple[np.ndarray, dict[str, dict[int, np.ndarray]]]:
    """Split the images of scikit-learn into disjoint pools, by digit.

    Args:
        seed: Of the split.

    Returns:
        All images `[n, 8, 8]`, from 0 to 1, and by kind of set and digit the positions of those that belong to it.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    random = np.random.default_rng([seed, 0])
    pools: dict[str, dict[int, np.ndarray]] = {kind: {} for kind in _SHARES}
    for digit in range(10):
        shuffled = random.permutation(np.flatnonzero(digits.target == digit))
        for kind, (start, stop) in _SHARES.items():
            pools[kind][digit] = shuffled[int(start * len(shuffled)) : int(stop * len(shuffled))]
    return (digits.images / 16).astype(np.float32), pools


@dataclass(frozen=True)
class DigitCollages:
    """Tiles of digits, one pair of digits per tile, of graded ease.

    In training the digit in every tile tells the label. In the validation and test set of a tile only that tile
    does; the others show either digit of their pair at random. The three kinds of set use disjoint source images.

    Args:
        examples: Number of training collages (and of each upper-bound training set).
        validation_examples: Number of collages per validation set.
        test_examples: Number of collages per test set.
        pairs: Digits for label 0 and 1, one pair per tile, in reading order.
        contrast: Factor on the pixels (0 to 1) of each tile.
        noise: Standard deviation of the Gaussian pixel noise of each tile.
        columns: Tiles side by side.
        seed: Seed of source split, draws and noise.
    """

    examples: int = 4096
    validation_examples: int = 2000
    test_examples: int = 2000
    pairs: Sequence[Sequence[int]] = ((0, 1), (3, 8), (4, 9), (5, 6))
    contrast: Sequence[float] = (1.5, 1.0, 1.0, 1.0)
    noise: Sequence[float] = (0.0, 0.1, 0.2, 0.3)
    columns: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("examples", "validation_examples", "test_examples", "columns"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}; allowed are 1, 2, 3, ...")
        for name, one in (("pairs", "pair of digits"), ("contrast", "number"), ("noise", "number")):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)):
                per = "part" if name == "pairs" else "pair"
                raise DataError(f"{name} is {value!r}; expected a list with one {one} per {per}.")
        if not self.pairs or len(self.pairs) % self.columns:
            raise DataError(f"pairs names {len(self.pairs)} tiles, which do not fill rows of {self.columns} (columns).")
        for pair in self.pairs:
            if not isinstance(pair, (list, tuple)) or not all(isinstance(digit, int) for digit in pair):
                raise DataError(f"pairs holds {pair!r}; each pair is two different digits from 0 to 9, such as [3, 8].")
            if len(pair) != 2 or pair[0] == pair[1] or not set(pair) <= set(range(10)):
                raise DataError(f"pairs holds {list(pair)}; each pair is two different digits from 0 to 9.")
        if len({tuple(pair) for pair in self.pairs}) < len(self.pairs):
            raise DataError(f"pairs names a pair of digits twice: {[list(pair) for pair in self.pairs]}.")
        for name in ("contrast", "noise"):
            values = getattr(self, name)
            numbers = all(isinstance(value, (int, float)) and 0 <= value < float("inf") for value in values)
            if len(values) != len(self.pairs) or not numbers:
                raise DataError(
                    f"{name} is {list(values)}; expected a list of {len(self.pairs)} numbers from 0 up, one per pair."
                )

    def fingerprint(self) -> str:
        """Identify the source images: the version of scikit-learn that carries them."""
        import sklearn

        return f"scikit-learn {sklearn.__version__} digits"

    def load(self, upper_bounds: bool = True) -> Data:
        """Draw all sets."""
        images, pools = digit_pools(self.seed)
        parts = tuple(f"{pair[0]}-{pair[1]}" for pair in self.pairs)
        train = self._draw("training set", images, pools["train"], self.examples, None, 0)
        sizes = {"validation": self.validation_examples, "test": self.test_examples}
        sets = {
            kind: {
                part: self._draw(f"{kind} set of tile {part}", images, pools[kind], size, tile, 10 * number + tile)
                for tile, part in enumerate(parts)
            }
            for number, (kind, size) in enumerate(sizes.items(), start=1)
        }
        sets["test"][IN_DISTRIBUTION] = self._draw("test set", images, pools["test"], self.test_examples, None, 1)
        bounds = {
            part: self._draw(f"upper bound of tile {part}", images, pools["train"], self.examples, tile, 30 + tile)
            for tile, part in enumerate(parts if upper_bounds else ())
        }
        selection = "validation collages of source images that neither training nor test use"
        boxes = {part: (8 * (tile // self.columns), 8 * (tile % self.columns), 8, 8) for tile, part in enumerate(parts)}
        return Data(parts, 2, train, sets["validation"], sets["test"], bounds, selection, boxes)

    def _draw(
        self, where: str, images: np.ndarray, pool: dict[int, np.ndarray], count: int, only: int | None, stream: int
    ) -> gr.Batch:
        random = np.random.default_rng([self.seed, 1, stream])  # own stream: sizes of other sets do not matter
        labels = random.permutation(np.arange(count) % 2)
        tiles = []
        for tile, pair in enumerate(self.pairs):
            shown = labels if only in (None, tile) else random.integers(0, 2, count)
            drawn = np.where(shown == 0, random.choice(pool[pair[0]], count), random.choice(pool[pair[1]], count))
            noise = self.noise[tile] * random.standard_normal((count, 8, 8), dtype=np.float32)
            tiles.append(np.float32(self.contrast[tile]) * images[drawn] + noise.astype(np.float32))
        rows = len(tiles) // self.columns
        grid = np.stack(tiles).reshape(rows, self.columns, count, 8, 8).transpose(2, 0, 3, 1, 4)
        collages = np.ascontiguousarray(grid).reshape(count, 8 * rows, 8 * self.columns)
        return batch_of(where, torch.from_numpy(collages), torch.from_numpy(labels), None, 2)
