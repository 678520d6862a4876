"""Reading examples from whatever people keep their data in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from gradreg.batch import Batch, as_batch
from gradreg.errors import BatchError
from gradreg.tracin._rows import Collate, RowId, Rows, SampleRows, TensorRows, quiet
from gradreg.tracin._samplers import visited_rows

__all__ = ["RowId", "Rows", "read_rows"]


def read_rows(data: Any, collate: Collate | None = None) -> Rows:
    """Read examples from tensors, datasets and loaders.

    Accepted: a `Batch`, a tensor, a pair of tensors, a mapping of tensors with `labels`; any map-style dataset or list of
    rows (tensors, pairs, mappings; sequences of unequal lengths are padded on the right, labels with -100); a
    `ConcatDataset`, or a list or mapping of several of these, which are merged and known by position or name; a
    `DataLoader`, of which the dataset and `collate_fn` are taken.

    The order is that of the dataset, never that of a loader: `shuffle`, `drop_last` and batch sizes change nothing. A custom
    sampler that visits some of the rows selects these, with a warning.

    Args:
        data: The examples.
        collate: From a list of rows to a batch, in place of the above.

    Raises:
        BatchError: If it is none of these, is empty, or has no rows that could be known by an index (iterable datasets,
            loaders of ready-made batches).
    """
    if isinstance(data, Rows):
        return data
    if isinstance(data, ConcatDataset):
        return _merged(dict(enumerate(data.datasets)), collate)
    if _is_tensors(data):
        return Rows({0: TensorRows(as_batch(data))}, None)
    if isinstance(data, Mapping):
        return _merged(dict(data.items()), collate)
    if isinstance(data, (list, tuple)) and data and all(_is_collection(item) for item in data):
        return _merged(dict(enumerate(data)), collate)
    if isinstance(data, DataLoader):
        return _from_loader(data, collate)
    return Rows({0: _part(data, None, collate)}, collate)


def _merged(named: Mapping[Any, Any], collate: Collate | None) -> Rows:
    parts: dict[int | str, TensorRows | SampleRows] = {}
    for name, data in named.items():
        if isinstance(data, DataLoader):
            raise BatchError(f"Dataset {name!r} is a DataLoader; merge the datasets themselves and give collate=.")
        parts[name] = TensorRows(as_batch(data)) if _is_tensors(data) else _part(data, None, collate)
    if len({type(part) for part in parts.values()}) > 1:  # a TensorDataset beside another: read both row by row
        parts = {
            name: SampleRows(named[name], None) if isinstance(named[name], Dataset) else part
            for name, part in parts.items()
        }
    return Rows(parts, collate)


def _part(dataset: Any, rows: Sequence[int] | None, collate: Collate | None) -> TensorRows | SampleRows:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise BatchError(
            f"A {type(dataset).__name__} has no rows that are known by an index, so scores could not be told apart. Give a "
            "map-style dataset (__len__ and __getitem__) or a list of rows, for example list(dataset)."
        )
    if isinstance(dataset, (str, bytes)):
        raise BatchError(f"Cannot read examples from a {type(dataset).__name__}.")
    if type(dataset) is TensorDataset and len(dataset.tensors) <= 2 and rows is None and collate is None:
        inputs, targets = (*dataset.tensors, None)[:2]
        return TensorRows(Batch(inputs, targets))
    return SampleRows(dataset, rows)


def _from_loader(loader: DataLoader[Any], collate: Collate | None) -> Rows:
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        _part(dataset, None, None)
    if loader.batch_size is None and loader.batch_sampler is None:
        raise BatchError(
            "The DataLoader has batch_size=None: its dataset gives ready-made batches, whose rows have no index. Give a dataset "
            "of single examples."
        )
    if collate is None and loader.collate_fn is not default_collate:
        collate = loader.collate_fn
    with quiet():
        rows = visited_rows(loader)
    if isinstance(dataset, ConcatDataset):
        return _merged(dict(enumerate(dataset.datasets)), collate) if rows is None else _parts(dataset, rows, collate)
    if rows is None and _is_tensors(dataset) and collate is None:
        return Rows({0: TensorRows(as_batch(dataset))}, None)
    return Rows({0: _part(dataset, rows, collate)}, collate)


def _parts(dataset: ConcatDataset[Any], rows: Sequence[int], collate: Collate | None) -> Rows:
    """Read selected rows of merged datasets, which keep their places."""
    parts: dict[int | str, TensorRows | SampleRows] = {}
    start = 0
    for number, (member, end) in enumerate(zip(dataset.datasets, dataset.cumulative_sizes, strict=True)):
        within = [row - start for row in rows if start <= row < end]
        if within:
            parts[number] = SampleRows(member, within)
        start = end
    return Rows(parts, collate)


def _is_tensors(data: Any) -> bool:
    if isinstance(data, (Tensor, Batch)):
        return True
    if isinstance(data, Mapping):
        return any(isinstance(value, Tensor) for value in data.values())
    if isinstance(data, (tuple, list)) and len(data) == 2:
        inputs, targets = data
        if isinstance(inputs, Tensor):
            return isinstance(targets, Tensor)
        holds = isinstance(inputs, (tuple, list, Mapping)) and _is_tensors(inputs)
        return holds and isinstance(targets, (Tensor, type(None)))
    return False


def _is_collection(item: Any) -> bool:
    """Whether something in a list is a dataset of its own rather than one row; mappings in a list are rows."""
    return isinstance(item, (Dataset, DataLoader, Batch))
