"""data=tensors: reads what is documented, refuses the rest by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradreg.experiments.data import TensorFile
from gradreg.experiments.data.splits import DataError


@pytest.fixture
def save(tmp_path, arrays):
    def write(**changes):
        kept = {name: value for name, value in {**arrays, **changes}.items() if value is not None}
        np.savez(tmp_path / "my.npz", **kept)
        return str(tmp_path / "my.npz")

    return write


def test_reads_all_sets(save, arrays):
    path = save(
        validation_left_inputs=arrays["test_left_inputs"][:8],
        validation_left_targets=arrays["test_left_targets"][:8],
        upper_bound_left_inputs=arrays["test_left_inputs"],
        upper_bound_left_targets=arrays["test_left_targets"],
    )
    data = TensorFile(path).load()
    assert data.parts == ("left", "right")
    assert data.classes == 2
    assert {name: len(batch) for name, batch in data.test.items()} == {"id": 48, "left": 48, "right": 24}
    assert {name: len(batch) for name, batch in data.validation.items()} == {"left": 8, "right": 24}
    assert set(data.upper_bounds) == {"left"}
    assert not TensorFile(path).load(upper_bounds=False).upper_bounds
    assert "half of the test set for right" in data.selection
    torch.testing.assert_close(data.train.inputs, torch.from_numpy(arrays["train_inputs"]))
    assert set(data.validation["right"].targets.tolist()) == {0, 1}


def test_other_numeric_types_are_read(save, arrays):
    path = save(train_inputs=arrays["train_inputs"].astype(">f8"), train_targets=arrays["train_targets"].astype("u1"))
    data = TensorFile(path).load()
    assert data.train.inputs.dtype == torch.float32
    assert data.train.targets.dtype == torch.int64


def nan_at(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array[3, 2] = np.nan
    return array


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("test_left_targets", lambda a: a + 5, "labels range from 5 to 6; allowed are 0 to 1"),
        ("train_targets", lambda a: a - 1, "labels range from -1 to 0"),
        ("train_targets", lambda a: a * 0, "one class only"),
        ("train_targets", lambda a: a.astype(float), "integer class indices"),
        ("train_targets", lambda a: a.astype(bool), "integer class indices"),
        ("train_targets", lambda a: a[:-1], "one label per example"),
        ("train_targets", lambda a: a[:, None], "one label per example"),
        ("train_inputs", nan_at, "1 of 48 examples hold NaN"),
        ("train_inputs", lambda a: a.astype(np.float64) * 1e300, "beyond float32"),
        ("train_inputs", lambda a: a.astype(int), "expected floating point"),
        ("train_inputs", lambda a: a.astype(complex), "dtype complex128"),
        ("train_inputs", lambda a: a.astype(str), "expected numbers"),
        ("train_inputs", lambda a: a[:, 0], "expected [examples, ...features]"),
        ("test_right_inputs", lambda a: a[:0], "empty"),
        ("test_right_inputs", lambda a: a[:, :5], "an example has the shape [5], one of the training set [6]"),
        ("train_targets", lambda a: None, "array 'train_targets' is missing"),
        ("test_left_targets", lambda a: None, "array 'test_left_targets' is missing"),
        ("train_inputs", lambda a: a.astype(object), "Store numeric arrays only"),
    ],
)
def test_wrong_arrays(save, arrays, name, change, expected):
    path = save(**{name: change(arrays[name])})
    with pytest.raises(DataError) as caught:
        TensorFile(path).load()
    assert expected in str(caught.value)
    assert "my.npz" in str(caught.value)


def test_unknown_array_names_the_closest(save, arrays):
    with pytest.raises(DataError, match=r"unknown array 'trian_inputs' .closest: 'train_inputs'"):
        TensorFile(save(trian_inputs=arrays["train_inputs"])).load()


def test_no_test_set(save, arrays):
    gone = {name: None for name in arrays if name.startswith("test")}
    with pytest.raises(DataError, match="there is no test set"):
        TensorFile(save(**gone)).load()


def test_wrong_files(tmp_path):
    with pytest.raises(DataError, match="not a file"):
        TensorFile(str(tmp_path / "absent.npz"))
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(DataError, match=r"not an \.npz file"):
        TensorFile(str(tmp_path / "text.npz"))


def test_trains_on_it(save, arrays, started):
    bound = {f"upper_bound_left_{what}": arrays[f"test_left_{what}"] for what in ("inputs", "targets")}
    run = started("data=tensors", f"data.path={save(**bound)}", "arms=[penalty]", "plots=true")
    results = run.read("results.json")
    assert results["parts"] == ["left", "right"]
    assert results["upper_bound"]["left"] > 0
    assert results["upper_bound"]["right"] is None
    assert (run.path / "plots" / "results.png").exists()
