"""A vmapped function against a Python loop, derivatives included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from gradreg.errors import GradregError
from gradreg.testing.reference import random_functional

Batched = Callable[..., Any]

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_NAMES = ("value", "first derivative", "second derivative")


def check_against_loop(
    fn: Batched,
    *args: Any,
    in_dims: int | tuple[int | None, ...] = 0,
    out_dims: int = 0,
    randomness: str = "error",
    derivatives: int = 2,
    parameters: Iterable[Tensor] = (),
    vmapped: Batched | None = None,
    tolerance: float | None = None,
) -> None:
    r"""Demand that `vmap(fn)` equals a loop over examples: values, and the derivatives of what comes out.

    With $y = \mathrm{vmap}(f)(a)$ and the fixed random functional $\varphi(y) = \sum a \sin(b y + c)$, compared are $y$,
    $\partial \varphi / \partial a$, and the derivative of $\varphi$ of that gradient, with respect to every floating-point
    tensor among the arguments and `parameters`. torch has batching rules that are silently wrong, some in a derivative only
    (torch 2.13: `linalg.solve` with an axis that the right-hand side lacks; LayerNorm in a function that is itself a gradient).

    Args:
        fn: The function of one example, as one passes it to `torch.func.vmap`. For per-example gradients that will be
            differentiated again, `torch.func.grad(of_one_example)`.
        *args: Its arguments with a batch axis: tensors, or tuples and dictionaries of them. float64 shows most.
        in_dims: The batch axis; a tuple gives one for each argument, None for an argument that all examples share.
        out_dims: The batch axis of the results.
        randomness: As for vmap. With `"same"`, every example of the loop starts from the same seed and numbers are compared;
            with `"different"` only structure, shapes and finiteness can be.
        derivatives: 0, 1 or 2: how many are compared.
        parameters: Tensors that `fn` reads without taking them as arguments, such as `net.parameters()`.
        vmapped: Another batched form of `fn`, in place of `vmap(fn)`: code of your own that does the batch at once.
        tolerance: Largest difference relative to the largest entry; 1e-9 in float64, 1e-4 in float32.

    Raises:
        AssertionError: If they differ: what, where, by how much.
        GradregError: If an argument does not fit.

    Example:
        >>> import torch
        >>> from gradreg.testing import check_against_loop
        >>> x, weight = torch.randn(5, 3).double(), torch.randn(3).double()
        >>> check_against_loop(lambda x, w: torch.tanh(x @ w), x, weight, in_dims=(0, None))
        >>> matrices, right = torch.randn(4, 3, 3).double(), torch.randn(3, 1).double()
        >>> check_against_loop(lambda a: torch.linalg.solve(a[None], right), matrices)  # wrong in torch 2.13
        Traceback (most recent call last):
        ...
        AssertionError: vmap and the loop differ in the value: shape (4, 4, 3, 1), expected (4, 1, 3, 1)...
    """
    if derivatives not in (0, 1, 2):
        raise GradregError(f"derivatives={derivatives!r}; allowed are 0, 1 and 2.")
    leaves, structure = pytree.tree_flatten(args)
    dims = _dims(args, in_dims)
    size = _batch_size(leaves, dims)
    tracked = [leaf.detach().clone().requires_grad_() if _floating(leaf) else leaf for leaf in leaves]
    variables = {f"argument {i}": leaf for i, leaf in enumerate(tracked) if _floating(leaf)}
    variables |= {f"parameter {i}": tensor for i, tensor in enumerate(parameters) if tensor.requires_grad}
    at_once = vmapped or vmap(
        fn, in_dims=pytree.tree_unflatten(dims, structure), out_dims=out_dims, randomness=randomness
    )

    def looped() -> Any:
        return _loop(fn, tracked, dims, size, structure, out_dims, randomness)

    def batched() -> Any:
        torch.manual_seed(0)
        return at_once(*pytree.tree_unflatten(tracked, structure))

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        found, expected = _flat(batched()), _flat(looped())
        for order in range(derivatives + 1):
            _compare(found, expected, order, randomness, tolerance)
            if order == derivatives or randomness == "different":
                return
            expected = _differentiated(expected, variables, "the loop", order)
            found = _differentiated(found, variables, "vmap", order)


def _dims(args: tuple[Any, ...], in_dims: int | tuple[int | None, ...]) -> list[int | None]:
    """Return the batch axis of every leaf."""
    per_argument = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
    if len(per_argument) != len(args) or not all(dim is None or isinstance(dim, int) for dim in per_argument):
        raise GradregError(
            f"in_dims={in_dims!r} must be a number, or a number or None for each of the {len(args)} arguments."
        )
    return [
        dim if isinstance(leaf, Tensor) else None
        for argument, dim in zip(args, per_argument, strict=True)
        for leaf in pytree.tree_leaves(argument)
    ]


def _batch_size(leaves: list[Any], dims: list[int | None]) -> int:
    sizes = {leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
    if len(sizes) != 1:
        raise GradregError(f"The batch axes have the sizes {sorted(sizes)}; one size of two or more is needed.")
    (size,) = sizes
    if size < 2:
        raise GradregError("One example cannot show what batching does; give two or more.")
    return int(size)


def _loop(
    fn: Batched,
    leaves: list[Any],
    dims: list[int | None],
    size: int,
    structure: Any,
    out_dims: int,
    randomness: str,
) -> Any:
    rows = []
    torch.manual_seed(0)
    for example in range(size):
        if randomness == "same":
            torch.manual_seed(0)
        own = [leaf if dim is None else leaf.select(dim, example) for leaf, dim in zip(leaves, dims, strict=True)]
        rows.append(fn(*pytree.tree_unflatten(own, structure)))
    columns, structures = zip(*(pytree.tree_flatten(row) for row in rows), strict=True)
    return pytree.tree_unflatten(
        [torch.stack(column, out_dims) for column in zip(*columns, strict=True)], structures[0]
    )


def _flat(result: Any) -> dict[str, Tensor]:
    return {
        pytree.keystr(path) or "": leaf
        for path, leaf in pytree.tree_leaves_with_path(result)
        if isinstance(leaf, Tensor)
    }


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _differentiated(
    results: dict[str, Tensor], variables: dict[str, Tensor], who: str, order: int
) -> dict[str, Tensor]:
    total = random_functional({key: value for key, value in results.items() if value.is_floating_point()})
    if not total.requires_grad or not variables:
        return {name: torch.zeros_like(tensor) for name, tensor in variables.items()}
    try:
        found = torch.autograd.grad(
            total, list(variables.values()), create_graph=True, allow_unused=True, materialize_grads=True
        )
    except RuntimeError as problem:
        raise AssertionError(
            f"The {_NAMES[order + 1]} of {who} cannot be taken: {str(problem).splitlines()[0]} "
            f"(derivatives={order} leaves it out)."
        ) from problem
    return dict(zip(variables, found, strict=True))


def _compare(
    found: dict[str, Tensor], expected: dict[str, Tensor], order: int, randomness: str, tolerance: float | None
) -> None:
    found, expected = ({name: value.detach() for name, value in side.items()} for side in (found, expected))
    what = f"vmap and the loop differ in the {_NAMES[order]}"
    if found.keys() != expected.keys():
        raise AssertionError(f"{what}: vmap returns {sorted(found)}, the loop {sorted(expected)}.")
    scale = max((float(value.abs().max()) for value in expected.values() if value.numel()), default=0.0)
    for name, truth in expected.items():
        value, label = found[name], f" by {name}" if order else (f" at {name}" if name else "")
        if value.shape != truth.shape or value.dtype != truth.dtype:
            raise AssertionError(
                f"{what}{label}: shape {tuple(value.shape)}, expected {tuple(truth.shape)}; {value.dtype}, "
                f"expected {truth.dtype}. "
                "Usually a batching rule of torch, or a shape that was read inside fn."
            )
        if randomness == "different":
            if bool(torch.isfinite(value).all()) != bool(torch.isfinite(truth).all()):
                raise AssertionError(f"{what}{label}: only one of them is finite.")
            continue
        away = (value - truth).abs()
        away = torch.where(value.isnan() & truth.isnan(), 0, away).nan_to_num(nan=torch.inf)
        allowed = (_TOLERANCES.get(truth.dtype, 5e-2) if tolerance is None else tolerance) * scale + 1e-13
        if truth.numel() and float(away.max()) > allowed:
            place = [int(i) for i in torch.unravel_index(away.argmax(), truth.shape)]
            raise AssertionError(
                f"{what}{label}: {float(value[tuple(place)]):.10g} at {place}, the loop gives "
                f"{float(truth[tuple(place)]):.10g} (largest entry {scale:.3g}). Usually a batching rule of "
                f"torch; a loop, or an "
                "equivalent formula without the operation, is right."
            )
