"""One row of the zoo, and what rows are made of."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.scalars import (
    ScalarFunction,
)
from gradreg.wrt import Activations, Inputs, Outputs, Params, Wrt


@dataclass(frozen=True)
class Case:
    """One model to test on.

    Args:
        name: How tests call it.
        what: What goes wrong with it in naive code, in a few words.
        make_model: Makes the model; the same parameters every time.
        make_batch: Makes the batch; the same values every time.
        of: The scalar to differentiate.
        wrts: With respect to what, by a short name.
        tags: What the case needs or lacks; see the module.

    Example:
        >>> from gradreg.testing import reference, zoo
        >>> case = zoo.case("tied_weights")
        >>> truth = reference.gradients(case.make_model(), case.make_batch(), case.of, case.wrts["params"])
        >>> sorted(truth)
        ['decoder.bias', 'encoder.weight']
    """

    name: str
    what: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    of: ScalarFunction
    wrts: dict[str, Wrt | tuple[Wrt, ...]]
    tags: frozenset[str] = frozenset()


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype, train: bool) -> Callable[[], nn.Module]:
    @functools.wraps(make)
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make().to(dtype).train(train)

    return build


class Data:
    """Seeded tensors for a batch of n examples."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        self.n, self.dtype = n, dtype
        self.generator = torch.Generator().manual_seed(1)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.n, *shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, (self.n, *shape), generator=self.generator)


def make_case(
    name: str,
    what: str,
    model: Callable[[], nn.Module],
    batch: Callable[[Data], Batch],
    of: ScalarFunction,
    *,
    tags: str = "",
    n: int = 3,
    dtype: torch.dtype = torch.float64,
    train: bool = False,
    **wrts: Wrt | tuple[Wrt, ...],
) -> Case:
    """Make a case from a model class and a recipe for its batch, both seeded.

    Args:
        name: How tests call it.
        what: What goes wrong with it in naive code.
        model: Makes the model; run under a fixed seed, then moved to the dtype.
        batch: Makes the batch from `Data`, whose `normal(*shape)` and `integers(high, *shape)` give `[n, *shape]`.
        of: The scalar to differentiate.
        tags: Words, separated by blanks.
        n: Number of examples.
        dtype: Of parameters and inputs.
        train: The mode of the model.
        **wrts: With respect to what, by a short name.

    Returns:
        The case.

    Example:
        >>> import torch, gradreg as gr
        >>> from gradreg.testing import zoo
        >>> class Gated(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate, self.value = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        ...     def forward(self, x):
        ...         return self.gate(x).sigmoid() * self.value(x)
        >>> gated = zoo.make_case(
        ...     "gated", "two paths that multiply", Gated, lambda data: gr.Batch(data.normal(3)), gr.logit(0),
        ...     inputs=gr.Inputs(), params=gr.Params("*"),
        ... )
        >>> zoo.check_case(gated)
    """
    return Case(
        name=name,
        what=what,
        make_model=seeded(model, dtype, train),
        make_batch=lambda: batch(Data(n, dtype)),
        of=of,
        wrts=wrts,
        tags=frozenset(tags.split()),
    )


def vectors(width: int, classes: int = 2) -> Callable[[Data], Batch]:
    """A batch of vectors with labels, groups and one extra."""

    def make(data: Data) -> Batch:
        return Batch(
            data.normal(width),
            targets=data.integers(classes),
            groups=torch.arange(data.n) % 2 * 3,
            extras={"weight": data.normal().abs() + 0.5},
        )

    return make


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for left, right in itertools.pairwise(widths):
        layers += [nn.Linear(left, right), activation()]
    return nn.Sequential(*layers[:-1])


def reconstruction(outputs: Tensor, batch: Batch) -> Tensor:
    """A scalar with two paths to the inputs: through the model and directly."""
    errors: Tensor = (outputs - batch.inputs) ** 2
    return errors.sum(-1)


def named_inputs(data: Data) -> Batch:
    return Batch({"a": data.normal(3), "b": data.normal(2), "ids": data.integers(3), "scale": 1.5})


ALL_PARAMS = Params("*")
EVERYWHERE: dict[str, Any] = {
    "inputs": Inputs(),
    "activations": Activations("*"),
    "outputs": Outputs(),
    "params": ALL_PARAMS,
}
