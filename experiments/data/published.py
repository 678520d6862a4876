"""The published collages (dteney/collages-dataset), read from the unpacked folder."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import gradreg as gr
from gradreg.experiments.data.splits import IN_DISTRIBUTION, Data, DataError, batch_of, halves
from gradreg.experiments.files import read_json

__all__ = ["PublishedCollages"]

_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class PublishedCollages:
    """Collages of MNIST, CIFAR-10, Fashion-MNIST and SVHN tiles: 8-bit PNG in `<folder>/<set>/<class>/`.

    Any published version is read: ordered or shuffled, two or four blocks, any resolution. Sets are `train-all`,
    `val-all`, `test-<block>` and, for upper bounds, `train-<block>-forUpperBoundsOnly`. There is no validation set in
    which one block alone is predictive, so half of each test set chooses the heads and the other half is reported.

    Args:
        folder: The unpacked folder, such as `collages-4blocks-randomOrder0-downsampling2`.
        limit: Read at most this many images per set and class; None for all.
    """

    folder: str
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise DataError(f"limit is {self.limit}; allowed are 1, 2, 3, ... or null for all images.")
        root = Path(self.folder)
        if not root.exists():
            raise DataError(
                f"folder {self.folder!r} does not exist (looked in {Path.cwd()}). Unpack one of the published archives "
                "and set data.folder to it."
            )
        if root.is_file():
            if _starts_with_pointer(root):
                raise DataError(f"{self.folder!r} is {_POINTER} Then unpack the archive and give the folder.")
            raise DataError(f"{self.folder!r} is a file; unpack the archive and set data.folder to the folder.")
        sets = _folders(root)
        if "train-all" not in sets:
            inner = [name for name in sets if "train-all" in _folders(root / name)]
            hint = f" Did you mean {str(root / inner[0])!r}?" if inner else f" Found: {', '.join(sets) or 'no folder'}."
            raise DataError(f"folder {self.folder!r} holds no set 'train-all'.{hint}")
        if not self._parts():
            raise DataError(f"folder {self.folder!r} holds no 'test-<block>' set. Found: {', '.join(sets)}.")

    def _parts(self) -> tuple[str, ...]:
        found = [name.removeprefix("test-") for name in _folders(Path(self.folder)) if name.startswith("test-")]
        order = ("mnist", "cifar", "fashion", "svhn")  # from easy to hard as published; others after them, by name
        return tuple(sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name)))

    def fingerprint(self) -> str:
        """Identify the files by name and size, without reading them."""
        digest = hashlib.sha256()
        for folder, subfolders, names in os.walk(self.folder):
            subfolders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                digest.update(f"{path.relative_to(self.folder)} {path.stat().st_size}\n".encode())
        return digest.hexdigest()[:16]

    def load(self, upper_bounds: bool = True) -> Data:
        """Read all sets."""
        parts = self._parts()
        train = self._read("train-all", None)
        shape = tuple(train.inputs.shape[1:])
        split = {part: halves(self._read(f"test-{part}", shape)) for part in parts}
        test = {part: pair[1] for part, pair in split.items()}
        test[IN_DISTRIBUTION] = self._read("val-all", shape)
        bounds = {p: self._read(f"train-{p}-forUpperBoundsOnly", shape) for p in (parts if upper_bounds else ())}
        selection = "half of each published test set; the other half is reported"
        validation = {part: pair[0] for part, pair in split.items()}
        return Data(parts, 2, train, validation, test, bounds, selection, self._boxes(parts, shape))

    def _boxes(self, parts: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, tuple[int, int, int, int]]:
        """Return where the blocks lie (by columns), if the options of the generator say that they keep their places."""
        options = read_json(Path(self.folder, "options.json"))
        if not options or options.get("randomBlockOrder"):
            return {}
        height, width = shape[0] // 2, shape[1] // -(-len(parts) // 2)
        return {part: (height * (k % 2), width * (k // 2), height, width) for k, part in enumerate(parts)}

    def _read(self, name: str, shape: tuple[int, ...] | None) -> gr.Batch:
        root = Path(self.folder, name)
        classes = []
        for label in (0, 1):
            folder = root / str(label)
            if not folder.is_dir():
                hint = f" Sets found: {', '.join(_folders(root.parent))}." if not root.is_dir() else ""
                skip = " Set upper_bound=null to do without." if "forUpperBounds" in name else ""
                raise DataError(f"{str(folder)!r} is missing: every set has the folders '0' and '1'.{hint}{skip}")
            files = sorted(folder.glob("*.png"))[: self.limit]
            if not files:
                raise DataError(f"{str(folder)!r} holds no .png file.")
            classes.append(_images(files))
            if classes[0].shape[1:] != classes[-1].shape[1:]:
                raise DataError(f"{str(root)!r}: class 0 and class 1 differ in size of the images.")
        inputs = torch.from_numpy(np.concatenate(classes)).float() / 255
        targets = torch.arange(2).repeat_interleave(torch.tensor([len(images) for images in classes]))
        return batch_of(str(root), inputs, targets, shape, 2)


_POINTER = "a Git-LFS pointer, not the data itself: run `git lfs pull` in the clone, or download the file."


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []


def _starts_with_pointer(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(len(_LFS)) == _LFS


def _images(files: list[Path]) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    images: np.ndarray | None = None
    for position, file in enumerate(files):
        try:
            with Image.open(file) as image:
                if image.mode != "L":
                    raise DataError(f"{str(file)!r} has the mode {image.mode!r}; expected 8-bit grey ('L').")
                pixels = np.asarray(image)
        except UnidentifiedImageError as error:
            reason = _POINTER if _starts_with_pointer(file) else "not an image that can be read."
            raise DataError(f"{str(file)!r} is {reason}") from error
        if images is None:
            images = np.empty((len(files), *pixels.shape), dtype=np.uint8)
        if pixels.shape != images.shape[1:]:
            raise DataError(
                f"{str(file)!r} is {pixels.shape[1]}x{pixels.shape[0]} pixels, {str(files[0])!r} "
                f"{images.shape[2]}x{images.shape[1]}; all images of a version have one size."
            )
        images[position] = pixels
    assert images is not None
    return images
