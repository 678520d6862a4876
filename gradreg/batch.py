"""Batch: the data that gradients are taken over, one row per example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradreg.errors import BatchError, GradregError, closest

__all__ = ["Batch", "as_batch"]

_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True, eq=False)
class Batch:
    r"""Inputs, targets and all that belongs to the same examples; the first axis of every tensor is the example.

    Args:
        inputs: A tensor (called `"inputs"`), a tuple of tensors (called `"0"`, `"1"`, ...) or a mapping from
            names to tensors, which is passed to the model as keyword arguments. Numbers, strings, flags and None in
            a tuple or mapping belong to no example and are passed on as they are.
        targets: Labels or regression targets: a tensor, or a tuple or mapping of tensors.
        groups: Integer group (environment) of every example, `[n]`.
        extras: Further tensors that belong to examples: masks, references, teacher derivatives.

    A batch is compared by identity: a session of `Objective` knows its batch as this very object.

    Raises:
        BatchError: If there is no example, or tensors disagree on the number of examples.

    Example:
        >>> import torch
        >>> from gradreg import Batch
        >>> batch = Batch(torch.zeros(4, 3), targets=torch.tensor([0, 1, 1, 0]))
        >>> len(batch), batch.input_names
        (4, ('inputs',))
        >>> len(batch[1:3])
        2
    """

    inputs: Any
    targets: Any = None
    groups: Tensor | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.inputs, list):
            object.__setattr__(self, "inputs", tuple(self.inputs))
        if isinstance(self.inputs, Mapping) and not isinstance(self.inputs, dict):
            object.__setattr__(self, "inputs", dict(self.inputs))  # a BatchEncoding, which transforms do not look into
        if not isinstance(self.inputs, (Tensor, tuple, Mapping)):
            raise BatchError(
                f"Batch.inputs is a {type(self.inputs).__name__}; allowed are a tensor, a tuple of tensors or a mapping "
                "from names to tensors."
            )
        found = {f"inputs[{name!r}]": value for name, value in self.named_inputs().items() if isinstance(value, Tensor)}
        if not found:
            raise BatchError("Batch.inputs holds no tensor: there is nothing to run the model on.")
        for name in ("targets", "groups", "extras"):
            found.update(_named_tensors(getattr(self, name), name))
        if self.groups is not None and (
            not isinstance(self.groups, Tensor) or self.groups.dim() != 1 or self.groups.is_floating_point()
        ):
            raise BatchError("Batch.groups must be an integer tensor of shape [n], the group of every example.")
        scalars = [name for name, value in found.items() if value.dim() == 0]
        if scalars:
            raise BatchError(f"{', '.join(scalars)} has no axis; the first axis of every tensor is the example.")
        reference = next(iter(found))
        length = found[reference].shape[0]
        unequal = [f"{name}: {value.shape[0]}" for name, value in found.items() if value.shape[0] != length]
        if unequal:
            raise BatchError(
                f"{reference} has {length} examples but {', '.join(unequal)}. The first axis of every tensor is the "
                "example; pass shared constants inside the model or a closure."
            )
        if length == 0:
            raise BatchError("The batch is empty: it has no example. Skip empty batches before calling gradreg.")

    def __len__(self) -> int:
        return int(next(v for v in self.named_inputs().values() if isinstance(v, Tensor)).shape[0])

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in the order of the model's arguments."""
        return tuple(self.named_inputs())

    def named_inputs(self) -> dict[str, Any]:
        """Return the inputs as a dictionary from name to value."""
        if isinstance(self.inputs, Tensor):
            return {"inputs": self.inputs}
        if isinstance(self.inputs, Mapping):
            return {str(name): value for name, value in self.inputs.items()}
        return {str(position): value for position, value in enumerate(self.inputs)}

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor of the batch requires grad."""
        return any(tensor.requires_grad for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the batch."""
        found: list[Tensor] = []
        stack: list[Any] = [self.inputs, self.targets, self.groups, self.extras]
        while stack:
            value = stack.pop()
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, Mapping):
                stack += value.values()
            elif isinstance(value, (tuple, list)):
                stack += value
        return found

    def with_inputs(self, values: Mapping[str, Any]) -> Batch:
        """Return a batch in which the named inputs are replaced."""
        named = self.named_inputs()
        for name in values:
            if name not in named:
                raise BatchError(f"The batch has no input {name!r}; its inputs are {closest(name, named)}.")
        named.update(values)
        if isinstance(self.inputs, Tensor):
            return replace(self, inputs=named["inputs"])
        return replace(self, inputs=named if isinstance(self.inputs, Mapping) else tuple(named.values()))

    def with_extras(self, **extras: Any) -> Batch:
        """Return a batch with further extras. A session knows it as the same data: its forward is not run again.

        Example:
            >>> import torch
            >>> from gradreg import Batch
            >>> sorted(Batch(torch.zeros(2, 3), extras={"mask": torch.ones(2, 3)}).with_extras(weight=torch.ones(2)).extras)
            ['mask', 'weight']
        """
        return replace(self, extras={**self.extras, **extras})

    def extra(self, name: str, purpose: str) -> Tensor:
        """Return a tensor of the extras.

        Args:
            name: Its name.
            purpose: What it is needed for, for the message.

        Raises:
            BatchError: If there is none of that name, or it is no tensor.
        """
        value = self.extras.get(name)
        if not isinstance(value, Tensor):
            found = f"has {closest(name, self.extras)}" if value is None else f"holds a {type(value).__name__}"
            raise BatchError(f"batch.extras[{name!r}] is needed: {purpose}. The batch {found}.")
        return value

    def same_data(self, other: Batch) -> bool:
        """Whether inputs, targets and groups are the very same objects, whatever the extras."""
        return self is other or (
            self.inputs is other.inputs and self.targets is other.targets and self.groups is other.groups
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return a batch with `function` applied to every tensor."""
        return Batch(
            map_tensors(function, self.inputs),
            map_tensors(function, self.targets),
            map_tensors(function, self.groups),
            map_tensors(function, self.extras),
        )

    def to(self, *args: Any, **kwargs: Any) -> Batch:
        """Move every tensor as `torch.Tensor.to` does; a dtype is applied to floating-point tensors only."""
        dtype = kwargs.pop("dtype", None) or next((a for a in args if isinstance(a, torch.dtype)), None)
        places = tuple(a for a in args if not isinstance(a, torch.dtype))

        def move(tensor: Tensor) -> Tensor:
            tensor = tensor.to(*places, **kwargs) if places or kwargs else tensor
            return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

        return self.map(move)

    def __getitem__(self, index: slice | Tensor | list[int]) -> Batch:
        if not isinstance(index, (slice, Tensor, list)) or (isinstance(index, Tensor) and index.dim() != 1):
            raise BatchError(
                f"batch[{index!r}] would lose the example axis; use a slice, a list or an index tensor [m]."
            )
        return self.map(lambda tensor: tensor[index])

    def chunks(self, size: int) -> Iterator[Batch]:
        """Yield consecutive parts of at most `size` examples."""
        for start in range(0, len(self), size):
            yield self[start : start + size]


def as_batch(batch: Any) -> Batch:
    """Read a batch from what people pass around.

    Accepted: a `Batch`; a tensor; a pair `(inputs, targets)` (tuple or list, as data loaders give it); a mapping from
    names to tensors, whose `"labels"` become the targets (so labels stay out of the model call).

    Raises:
        BatchError: If it is none of these.

    Example:
        >>> import torch
        >>> from gradreg import as_batch
        >>> as_batch((torch.zeros(2, 3), torch.tensor([0, 1]))).targets
        tensor([0, 1])
    """
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, Tensor):
        return Batch(batch)
    if isinstance(batch, Mapping):
        named = dict(batch.items())
        labels = named.pop("labels", None)
        return Batch(named, targets=labels)
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, targets = batch
        return Batch(inputs, targets=targets)
    size = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise BatchError(
        f"Cannot read a batch from a {type(batch).__name__}{size}. Allowed: gradreg.Batch, a tensor, a pair "
        "(inputs, targets), or a mapping such as a BatchEncoding. For several inputs use Batch(inputs=(a, b), targets=y)."
    )


def check_chunk_size(chunk_size: object) -> None:
    """Refuse what is no number of things at a time.

    Raises:
        GradregError: If it is neither None nor an integer from 1.
    """
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise GradregError(f"chunk_size={chunk_size!r}; allowed are None and integers from 1.")


def substituted(batch: Batch, values: Mapping[str, Any]) -> Batch:
    """Return `batch.with_inputs(values)` for values that are known to fit, without looking at them again."""
    inputs: Any = {**batch.named_inputs(), **values}
    if isinstance(batch.inputs, Tensor):
        inputs = inputs["inputs"]
    elif not isinstance(batch.inputs, Mapping):
        inputs = tuple(inputs.values())
    result = object.__new__(Batch)
    vars(result).update(vars(batch), inputs=inputs)
    return result


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to every tensor of a nested tuple, list or mapping; all else is kept."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        mapped = {name: map_tensors(function, item) for name, item in value.items()}
        # the outputs of a model of transformers, as of its encoder, are read by position too
        return type(value)(**mapped) if is_dataclass(type(value)) else mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def _named_tensors(value: Any, name: str) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        items = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (tuple, list)):
        items = [(f"{name}[{position}]", item) for position, item in enumerate(value)]
    elif isinstance(value, _CONSTANTS):
        return {}
    else:
        raise BatchError(
            f"Batch.{name} is a {type(value).__name__}; allowed are tensors, and tuples or mappings of them."
        )
    return {key: tensor for path, item in items for key, tensor in _named_tensors(item, path).items()}
