"""Reading examples: their order, where they lie, what they hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import gradreg as gr
from gradreg.tracin._data import RowId, read_rows

X, Y = torch.arange(22.0).view(11, 2), torch.arange(11)
LIST = [(X[i], Y[i]) for i in range(11)]
PAIRS: dict[str, Any] = {
    "pair": (X, Y),
    "batch": gr.Batch(X, Y),
    "TensorDataset": TensorDataset(X, Y),
    "list": LIST,
    "loader": DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, drop_last=True),
    "custom batch_sampler": DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(range(10, -1, -1), 4, False)),
    "concatenated": ConcatDataset([TensorDataset(X[:5], Y[:5]), Subset(TensorDataset(X, Y), range(5, 11))]),
    "several": [TensorDataset(X[:5], Y[:5]), TensorDataset(X[5:], Y[5:])],
    "tensors beside rows": [TensorDataset(X[:5], Y[:5]), Subset(TensorDataset(X, Y), range(5, 11))],
    "batches": [gr.Batch(X[:5], Y[:5]), gr.Batch(X[5:], Y[5:])],
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_form_gives_the_same_rows(name: str) -> None:
    rows = read_rows(PAIRS[name])
    assert len(rows) == 11
    batch, hashes = rows.read([0, 6, 3, 10])
    assert torch.equal(batch.inputs, X[[0, 6, 3, 10]])
    assert batch.targets.tolist() == [0, 6, 3, 10]
    assert torch.equal(rows.batch(range(2, 7)).inputs, X[2:7])
    expected = read_rows(LIST)
    assert np.array_equal(hashes, expected.hashes([0, 6, 3, 10]))
    assert rows.fingerprint(chunk=3) == expected.fingerprint()


def test_identity() -> None:
    assert read_rows((X, Y)).identity(7) == RowId(0, 7)
    assert read_rows(PAIRS["concatenated"]).identity(7) == RowId(1, 2)
    named = read_rows({"first": TensorDataset(X[:5], Y[:5]), "second": TensorDataset(X[5:], Y[5:])})
    assert [named.identity(i) for i in (4, 5)] == [RowId("first", 4), RowId("second", 0)]


def test_a_sampler_that_selects_is_said() -> None:
    loader = DataLoader(TensorDataset(X, Y), sampler=SubsetRandomSampler([7, 2, 9]))
    with pytest.warns(gr.errors.GradregWarning, match="visits 3 of 11 rows"):
        rows = read_rows(loader)
    assert [rows.identity(i).row for i in range(len(rows))] == [2, 7, 9]
    assert rows.batch(range(3)).targets.tolist() == [2, 7, 9]


def test_selected_rows_of_merged_datasets_keep_their_places() -> None:
    loader = DataLoader(PAIRS["concatenated"], sampler=SubsetRandomSampler([7, 2, 9]))
    with pytest.warns(gr.errors.GradregWarning, match="visits 3 of 11 rows"):
        rows = read_rows(loader)
    assert [rows.identity(i) for i in range(3)] == [RowId(0, 2), RowId(1, 2), RowId(1, 4)]
    assert rows.batch(range(3)).targets.tolist() == [2, 7, 9]


def test_a_generator_of_the_sampler_is_left_as_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    sampler = SubsetRandomSampler(range(11), generator=generator)
    before = generator.get_state()
    read_rows(DataLoader(TensorDataset(X, Y), sampler=sampler))
    assert torch.equal(before, generator.get_state())


class Drawing(Dataset[Tensor]):
    """Draws from all random streams, as augmentations do."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> Tensor:
        return torch.rand(2) + random.random() + float(np.random.rand())


def test_reading_leaves_random_streams() -> None:
    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = draws()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    read_rows(Drawing()).batch([0, 1])
    assert draws() == expected


def test_hashes_notice_changes() -> None:
    data = [(X[i].clone(), int(Y[i])) for i in range(3)]
    before = read_rows(data).fingerprint()
    data[1][0][1] += 1e-6
    assert read_rows(data).hashes([1]) != read_rows(LIST).hashes([1])
    assert read_rows(data).fingerprint() != before


class Table:
    """A dataset of dictionaries of lists, with `__getitems__`, as datasets of HF are."""

    rows = (
        {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [1, 2], "text": "a b"},
        {"input_ids": [3, 4, 5], "attention_mask": [1, 1, 1], "labels": [3, 4, 5], "text": "c d e"},
    )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        return [self.rows[row] for row in rows]


def test_dictionaries_are_padded_on_the_right() -> None:
    batch = read_rows(Table()).batch([0, 1])
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 0], [3, 4, 5]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.targets.tolist() == [[1, 2, -100], [3, 4, 5]]
    assert set(batch.inputs) == {"input_ids", "attention_mask"}
    assert read_rows(Table()).hashes([0]) == read_rows(Table()).read([0, 1])[1][:1]


def test_pairs_of_sequences_are_padded() -> None:
    batch = read_rows([(torch.tensor([1, 2]), torch.tensor([1, 2])), (torch.tensor([3]), torch.tensor([4]))]).batch(
        [0, 1]
    )
    assert batch.inputs.tolist() == [[1, 2], [3, 0]]
    assert batch.targets.tolist() == [[1, 2], [4, -100]]


def test_label_is_read_as_labels() -> None:
    batch = read_rows([{"pixel_values": torch.ones(3), "label": i} for i in range(2)]).batch([0, 1])
    assert batch.targets.tolist() == [0, 1]


def test_collate_is_taken_from_the_loader_or_given() -> None:
    def collate(rows: list[Any]) -> Any:
        return torch.stack([x * 2 for x, _ in rows]), torch.stack([y for _, y in rows])

    for rows in (read_rows(DataLoader(LIST, collate_fn=collate)), read_rows(TensorDataset(X, Y), collate)):
        assert torch.equal(rows.batch([1, 2]).inputs, X[1:3] * 2)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Stream(), "no rows that are known by an index"),
        (DataLoader(Stream()), "no rows that are known by an index"),
        (DataLoader(TensorDataset(X, Y), batch_size=None), "batch_size=None"),
        ((i for i in range(3)), "no rows that are known by an index"),
        ([], "no example"),
        ("text", "from a str"),
        ([gr.Batch(X, Y), LIST], "made 11 examples of 1 rows"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_read_is_named(data: Any, message: str) -> None:
    with pytest.raises(gr.errors.BatchError, match=message):
        read_rows(data).batch([0])


def test_bad_rows_are_named() -> None:
    with pytest.raises(gr.errors.BatchError, match="made 1 examples of 2 rows"):
        read_rows(LIST, lambda rows: (rows[0][0][None], rows[0][1][None])).batch([0, 1])
    with pytest.raises(gr.errors.BatchError, match="only the first axis may differ"):
        read_rows([torch.ones(2, 3), torch.ones(2, 4), torch.ones(2, 4)]).batch([0, 1])
    with pytest.raises(gr.errors.BatchError, match="no number that means"):
        read_rows([(torch.ones(2), torch.ones(2)), (torch.ones(3), torch.ones(3))]).batch([0, 1])
    with pytest.raises(gr.errors.BatchError, match="lacks the column 'b'"):
        read_rows([{"a": 1, "b": 2}, {"a": 1}]).batch([0, 1])
    with pytest.raises(gr.errors.BatchError, match="which is no tensor"):
        read_rows([object(), object()]).batch([0, 1])


def test_a_loader_with_an_endless_sampler() -> None:
    class Odd:
        def __iter__(self) -> Any:
            return iter([0])

    with pytest.raises(gr.errors.BatchError, match="has no length"):
        read_rows(DataLoader(TensorDataset(X, Y), sampler=Odd()))
