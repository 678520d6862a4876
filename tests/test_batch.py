from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradreg.batch import Batch, as_batch, map_tensors
from gradreg.errors import BatchError, GradregError

X, Y = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize(
    ("given_batch", "names", "targets"),
    [
        (X, ("inputs",), None),
        ((X, Y), ("inputs",), Y),
        ([X, Y], ("inputs",), Y),
        (((X, X), Y), ("0", "1"), Y),
        (([X, X], Y), ("0", "1"), Y),
        ({"a": X, "b": Y}, ("a", "b"), None),
        ({"input_ids": Y, "labels": Y}, ("input_ids",), Y),
        (OrderedDict(input_ids=Y, labels=Y), ("input_ids",), Y),
        (UserDict(input_ids=Y, labels=Y), ("input_ids",), Y),
        (({"a": X}, {"y": Y}), ("a",), {"y": Y}),
    ],
    ids=[
        "tensor",
        "pair",
        "list",
        "two inputs",
        "list of inputs",
        "mapping",
        "labels",
        "ordered",
        "encoding",
        "mappings",
    ],
)
def test_what_people_pass_around(given_batch: Any, names: tuple[str, ...], targets: Any) -> None:
    batch = as_batch(given_batch)
    assert batch.input_names == names
    assert len(batch) == 4
    assert batch.targets is targets or batch.targets == targets


def test_a_batch_is_passed_on_as_the_same_object() -> None:
    batch = Batch(X, Y)
    assert as_batch(batch) is batch


def test_labels_leave_the_caller_s_mapping_alone() -> None:
    mapping = {"input_ids": Y, "labels": Y}
    as_batch(mapping)
    assert sorted(mapping) == ["input_ids", "labels"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_batch((X, Y, Y)), "length 3"),
        (lambda: as_batch("x"), "str"),
        (lambda: as_batch(None), "NoneType"),
        (lambda: Batch("x"), "str"),
        (lambda: Batch({}), "no tensor"),
        (lambda: Batch({"a": 1.0}), "no tensor"),
        (lambda: Batch(X[:0]), "empty"),
        (lambda: Batch(X, Y[:3]), r"targets: 3"),
        (lambda: Batch((X, Y[:2])), r"inputs\['1'\]: 2"),
        (lambda: Batch(X, extras={"mask": X[:1]}), r"extras\['mask'\]: 1"),
        (lambda: Batch(X, extras={"mask": {"inner": X[:1]}}), r"extras\['mask'\]\['inner'\]: 1"),
        (lambda: Batch(X, groups=X), "groups"),
        (lambda: Batch(X, groups=Y.float()), "groups"),
        (lambda: Batch(X, groups=[0, 1, 1, 0]), "groups"),
        (lambda: Batch(torch.tensor(1.0)), "no axis"),
        (lambda: Batch(X, torch.tensor(1)), "no axis"),
        (lambda: Batch(X, extras={"f": object()}), "object"),
    ],
)
def test_refused(make: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message) as caught:
        make()
    assert isinstance(caught.value, GradregError)
    assert isinstance(caught.value, ValueError)


def full() -> Batch:
    return Batch({"a": X, "b": Y, "scale": 2.0}, (Y, X), groups=Y, extras={"mask": X > 3, "deep": {"x": [X]}})


def test_slicing_takes_everything_along() -> None:
    part = full()[1:3]
    assert len(part) == 2
    assert torch.equal(part.inputs["a"], X[1:3])
    assert part.inputs["scale"] == 2.0
    assert torch.equal(part.targets[1], X[1:3])
    assert torch.equal(part.groups, Y[1:3])
    assert torch.equal(part.extras["mask"], X[1:3] > 3)
    assert torch.equal(part.extras["deep"]["x"][0], X[1:3])


def test_one_example_keeps_its_axis() -> None:
    with pytest.raises(BatchError, match=r"batch\[2\].*slice"):
        full()[2]
    with pytest.raises(BatchError, match="empty"):
        full()[4:]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 7), start=st.integers(-8, 8), stop=st.integers(-8, 8), size=st.integers(1, 9), data=st.data())
def test_slices_chunks_and_rows_agree_with_those_of_tensors(
    n: int, start: int, stop: int, size: int, data: st.DataObject
) -> None:
    rows = torch.arange(n)
    batch = Batch((rows.double()[:, None], rows), rows, rows, {"row": rows})
    expected = rows[start:stop]
    if len(expected):
        part = batch[start:stop]
        assert len(part) == len(expected)
        for tensor in (part.inputs[1], part.targets, part.groups, part.extras["row"]):
            assert torch.equal(tensor, expected)
    parts = list(batch.chunks(size))
    assert torch.equal(torch.cat([part.targets for part in parts]), rows)
    assert all(len(part) == size for part in parts[:-1])
    chosen = data.draw(st.lists(st.integers(0, n - 1), min_size=1))
    assert torch.equal(batch[chosen].groups, torch.tensor(chosen))
    assert torch.equal(batch[torch.tensor(chosen)].extras["row"], torch.tensor(chosen))


def test_replaced_inputs() -> None:
    batch = full().with_inputs({"a": 2 * X})
    assert torch.equal(batch.inputs["a"], 2 * X)
    assert torch.equal(batch.inputs["b"], Y)
    assert torch.equal(Batch(X).with_inputs({"inputs": 2 * X}).inputs, 2 * X)
    assert torch.equal(Batch((X, Y)).with_inputs({"0": 2 * X}).inputs[0], 2 * X)
    with pytest.raises(BatchError, match="'a'"):
        full().with_inputs({"aa": X})


def test_moving_to_a_dtype_leaves_integers_alone() -> None:
    batch = full().to(torch.float64)
    assert batch.inputs["a"].dtype == torch.float64
    assert batch.groups.dtype == torch.long
    assert batch.extras["mask"].dtype == torch.bool
    assert Batch(X).to("cpu", dtype=torch.bfloat16).inputs.dtype == torch.bfloat16


def test_batches_are_compared_by_identity() -> None:
    assert Batch(X) != Batch(X)
    assert len({Batch(X), Batch(X)}) == 2


def test_named_tuples_keep_their_class() -> None:
    pair = namedtuple("pair", "x y")
    assert map_tensors(lambda tensor: tensor + 1, pair(X, 3)).y == 3
    assert isinstance(Batch(X, pair(Y, Y))[:2].targets, pair)
