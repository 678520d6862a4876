"""A user's own arrays from one .npz file."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import gradreg as gr
from gradreg.errors import closest
from gradreg.experiments.data.splits import IN_DISTRIBUTION, Data, DataError, batch_of, check_layout, halves

__all__ = ["TensorFile"]

_LAYOUT = (
    "train_inputs, train_targets; per part <name> test_<name>_inputs, test_<name>_targets and optionally "
    "validation_<name>_inputs/_targets and upper_bound_<name>_inputs/_targets; optionally test_id_inputs/_targets"
)


@dataclass(frozen=True)
class TensorFile:
    """Arrays in one .npz file, written by `numpy.savez`.

    Keys (inputs: floating point `[n, ...]`; targets: integer class indices `[n]`):

    - `train_inputs`, `train_targets`: the training set.
    - `test_<name>_inputs`, `test_<name>_targets`: one test set per part of the input; in it only that part is
      predictive. At least one. The name `id` is kept for the in-distribution test set, which may be absent.
    - `validation_<name>_inputs`, `validation_<name>_targets`: where the best head for that part is chosen. Parts
      without one use half of their test set, and only the other half is reported.
    - `upper_bound_<name>_inputs`, `upper_bound_<name>_targets`: training set in which only that part is predictive,
      for the upper bounds. May be absent.

    Args:
        path: The file.
        classes: Number of classes; None for the highest label of the training set plus one.
    """

    path: str
    classes: int | None = None

    def __post_init__(self) -> None:
        if not Path(self.path).is_file():
            raise DataError(
                f"path {self.path!r} is not a file (looked in {Path.cwd()}). Set data.path to an .npz file."
            )
        if not zipfile.is_zipfile(self.path):
            raise DataError(f"path {self.path!r} is not an .npz file; write it with numpy.savez. Keys: {_LAYOUT}.")
        if self.classes is not None and self.classes < 2:
            raise DataError(f"classes is {self.classes}; allowed are 2, 3, ... or null.")
        self._check_layout()

    def has_upper_bounds(self) -> bool:
        """Whether the file has training sets for upper bounds."""
        return any(name.startswith("upper_bound_") for name in _headers(self.path))

    def fingerprint(self) -> str:
        """Identify the content of the file."""
        with Path(self.path).open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()[:16]

    def load(self, upper_bounds: bool = True) -> Data:
        """Read and check all sets."""
        with np.load(self.path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        parts = self._check_names(set(arrays))
        train = self._set(arrays, "train", None, self.classes)
        classes = self.classes or int(train.targets.max()) + 1
        if classes < 2:
            raise DataError(f"{self.path!r}: train_targets hold one class only; there is nothing to tell apart.")
        sets: dict[str, dict[str, gr.Batch]] = {"validation": {}, "test": {}, "upper_bound": {}}
        shape = tuple(train.inputs.shape[1:])
        for kind, found in sets.items():
            for part in (*parts, IN_DISTRIBUTION):
                if f"{kind}_{part}_inputs" in arrays and (upper_bounds or kind != "upper_bound"):
                    found[part] = self._set(arrays, f"{kind}_{part}", shape, classes)
        missing = [part for part in parts if part not in sets["validation"]]
        for part in missing:
            sets["validation"][part], sets["test"][part] = halves(sets["test"][part])
        selection = "validation sets of the file" if not missing else f"half of the test set for {', '.join(missing)}"
        return Data(parts, classes, train, sets["validation"], sets["test"], sets["upper_bound"], selection)

    def _check_layout(self) -> None:
        """Check names, shapes and dtypes by the headers of the arrays, all sets at once."""
        headers = _headers(self.path)
        self._check_names(set(headers))
        problems = []
        shape = headers["train_inputs"].shape[1:]
        for name in sorted(name.removesuffix("_inputs") for name in headers if name.endswith("_inputs")):
            pair = []
            try:
                for what in ("inputs", "targets"):
                    header = headers[f"{name}_{what}"]
                    self._check_dtype(f"{name}_{what}", header.dtype)
                    kind = torch.from_numpy(np.empty(0, _readable(header.dtype))).dtype
                    pair.append(torch.empty(header.shape, dtype=kind, device="meta"))
                check_layout(f"{self.path} {name}", pair[0], pair[1], None if name == "train" else shape)
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError("\n     ".join(problems))

    def _check_names(self, names: set[str]) -> tuple[str, ...]:
        parts = []
        known = {"train_inputs", "train_targets"}
        for name in sorted(names):
            if name.startswith("test_") and name.endswith("_inputs") and name != f"test_{IN_DISTRIBUTION}_inputs":
                parts.append(name.removeprefix("test_").removesuffix("_inputs"))
        for part in (*parts, IN_DISTRIBUTION):
            kinds = ("test", "validation", "upper_bound") if part != IN_DISTRIBUTION else ("test",)
            known |= {f"{kind}_{part}_{what}" for kind in kinds for what in ("inputs", "targets")}
        problems = [f"unknown array {name!r} (closest: {closest(name, known, 2)})" for name in sorted(names - known)]
        required = {"train_inputs", "train_targets", *(f"test_{part}_targets" for part in parts)}
        required |= {name.removesuffix("inputs") + "targets" for name in names & known if name.endswith("inputs")}
        required |= {name.removesuffix("targets") + "inputs" for name in names & known if name.endswith("targets")}
        problems += [f"array {name!r} is missing" for name in sorted(required - names)]
        if not parts:
            problems.append("there is no test set 'test_<name>_inputs'")
        unsafe = [part for part in parts if not part.replace("_", "").replace("-", "").isalnum()]
        problems += [f"part {part!r} becomes a folder name; use letters, digits, '-' and '_'" for part in unsafe]
        if problems:
            raise DataError(f"{self.path!r}: {'; '.join(problems)}. Expected: {_LAYOUT}.")
        return tuple(parts)

    def _set(
        self, arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...] | None, classes: int | None
    ) -> gr.Batch:
        tensors = []
        for what in ("inputs", "targets"):
            array = arrays[f"{name}_{what}"]
            tensors.append(torch.from_numpy(np.ascontiguousarray(array.astype(_readable(array.dtype)))))
        return batch_of(f"{self.path} {name}", *tensors, shape, classes)

    def _check_dtype(self, name: str, dtype: np.dtype[Any]) -> None:
        if dtype.kind == "O":
            raise DataError(f"{self.path!r}: {name} holds Python objects. Store numeric arrays only.")
        if dtype.kind not in "fiub" or dtype.itemsize > 8:
            raise DataError(f"{self.path!r}: {name} has the dtype {dtype}; expected numbers of at most 64 bits.")


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _headers(path: str) -> dict[str, _Header]:
    """Read shapes and dtypes of the arrays in an .npz file without their values."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with archive.open(member) as file:
                try:
                    version = np.lib.format.read_magic(file)
                    read = np.lib.format.read_array_header_1_0
                    if version[0] > 1:
                        read = np.lib.format.read_array_header_2_0
                    shape, _, dtype = read(file)
                except ValueError as error:
                    raise DataError(f"{path!r}: {member!r} is no array ({error}). Write with numpy.savez.") from error
            found[member.removesuffix(".npy")] = _Header(shape, dtype)
    return found


def _readable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that torch reads: the native byte order, and signed integers, for unsigned ones can do little."""
    return np.dtype(np.int64) if dtype.kind == "u" else dtype.newbyteorder("=")
