"""What penalties on gradients at inputs and features share: norms per example and head, and values that belong to examples."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import draws_random_numbers, head_count
from gradreg.errors import BatchError, GradregError
from gradreg.model import unwrap
from gradreg.penalties import Metric, norm, squared_norm, under
from gradreg.scalars import AcrossHeads, ScalarFunction
from gradreg.wrt import Inputs, Wrt


def leading_axes(model: nn.Module, of: ScalarFunction) -> int:
    """Return 2 where gradients have an axis of heads behind that of examples, else 1."""
    return 1 if head_count(unwrap(model)) is None or isinstance(of, AcrossHeads) else 2


def squared_norms(found: Mapping[str, Tensor], metric: Metric | None, leading: int) -> Tensor:
    """Return squared norms per example (and head), over all keys and targets."""
    return squared_norm(_measured(found, metric), leading=leading)


def norms(found: Mapping[str, Tensor], metric: Metric | None, eps: float, leading: int) -> Tensor:
    """Return norms per example (and head), over all keys and targets."""
    return norm(_measured(found, metric), eps=eps, leading=leading)


def _measured(found: Mapping[str, Tensor], metric: Metric | None) -> Mapping[str, Tensor]:
    if metric is not None and len(found) > 1:
        raise GradregError(
            f"A metric is for one thing at a time, but wrt gives {', '.join(map(repr, found))}; name one."
        )
    return {name: under(metric, gradient) for name, gradient in found.items()}


def only(found: Mapping[str, Tensor], who: str) -> tuple[str, Tensor]:
    """Return the single key and gradient.

    Raises:
        GradregError: If there are several.
    """
    if len(found) != 1:
        raise GradregError(f"{who} is about one tensor, but wrt gives {', '.join(map(repr, found))}; name one.")
    return next(iter(found.items()))


def single_input(batch: Batch, wrt: Inputs, who: str) -> tuple[str, Tensor]:
    """Return the name and value of the one input that is meant.

    Raises:
        BatchError: If there are several, it is no floating-point tensor, or it has no axis but the example.
    """
    named = batch.named_inputs()
    floating = [key for key, value in named.items() if isinstance(value, Tensor) and value.is_floating_point()]
    names = floating if wrt.name is None else [wrt.name]
    if len(names) != 1 or not isinstance(named.get(names[0]), Tensor) or not named[names[0]].is_floating_point():
        kinds = ", ".join(f"{key}: {getattr(value, 'dtype', type(value).__name__)}" for key, value in named.items())
        raise BatchError(
            f"{who} needs one real floating-point input; the batch has {kinds}. Name it with wrt=Inputs(name); split complex "
            "inputs with torch.view_as_real."
        )
    value = named[names[0]]
    if value.dim() < 2:
        raise BatchError(
            f"{who}: input {names[0]!r} has shape {tuple(value.shape)}: no axis but the example. Give an unbatched example an "
            "axis of examples with unsqueeze(0)."
        )
    return names[0], value


def example_shape(batch: Batch, wrt: Wrt, gradient: Tensor, axes: int, who: str) -> tuple[int, ...]:
    """Return the shape `[n, *shape]` of what a gradient is taken with respect to.

    Args:
        batch: The batch.
        wrt: With respect to what; of an input the shape is known.
        gradient: `[n, (K,) *targets, *shape]`.
        axes: How many axes the shape has, n included, where it is that of features or activations.
        who: How messages call the penalty.
    """
    if isinstance(wrt, Inputs):
        return tuple(single_input(batch, wrt, who)[1].shape)
    return (gradient.shape[0], *gradient.shape[max(1, gradient.dim() - axes + 1) :])


def aligned(given: Tensor, gradient: Tensor) -> Tensor:
    """Return values `[n, *shape]` with axes of length 1 for the heads and targets of a gradient `[n, (K,) *targets, *shape]`."""
    return given.reshape(given.shape[0], *[1] * (gradient.dim() - given.dim()), *given.shape[1:])


def like_input(batch: Batch, name: str, value: Tensor, purpose: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a tensor of the extras that has the shape of an input (or the given one), in its dtype and on its device.

    Raises:
        BatchError: If it is missing, of another shape, or not floating point.
    """
    given = batch.extra(name, purpose)
    shape = tuple(value.shape) if shape is None else shape
    if given.shape != shape or not given.is_floating_point():
        raise BatchError(
            f"batch.extras[{name!r}] is {given.dtype} of shape {tuple(given.shape)}; {purpose}, floating point of shape "
            f"{shape}."
        )
    return given.to(value)


def own_forward(model: nn.Module, batch: Batch) -> bool:
    """Whether values at the inputs need a forward of their own to be compared with those at other points.

    Every forward at given points starts from the same random numbers; the shared one drew others.
    """
    return draws_random_numbers(model, batch)


def floating(model: nn.Module, batch: Batch) -> Tensor:
    """Return a tensor of the dtype and device that random numbers shall have."""
    tensors = (*model.parameters(), *batch.tensors())
    return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.zeros(()))


def drawn(batch: Batch, name: str, shape: torch.Size | tuple[int, ...], like: Tensor, how: str) -> Tensor:
    """Return random numbers from the extras, where they are fixed there, else from torch's global stream.

    Args:
        batch: The batch.
        name: Their name in the extras.
        shape: What is needed, the example first.
        like: A tensor of the dtype and device.
        how: `"uniform"` in [0, 1), `"normal"`, `"signs"`, or `"sphere"`: of squared length d over all axes behind two.

    Returns:
        The numbers.

    Raises:
        BatchError: If the given ones have another shape.
    """
    if name in batch.extras:
        given = batch.extra(name, "random numbers given by the caller")
        if given.shape != torch.Size(shape):
            raise BatchError(f"batch.extras[{name!r}] has shape {tuple(given.shape)}; expected {tuple(shape)}.")
        return given.to(like)
    dtype = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
    if how == "uniform":
        return torch.rand(shape, dtype=dtype, device=like.device)
    if how == "signs":
        return torch.randint(0, 2, shape, device=like.device).to(dtype) * 2 - 1
    normal = torch.randn(shape, dtype=dtype, device=like.device)
    if how == "sphere":
        flat = normal.flatten(2)
        length: Tensor = flat.norm(dim=2, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
        normal = (flat * flat.shape[2] ** 0.5 / length).reshape(normal.shape)
    return normal
