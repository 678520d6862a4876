"""Every operation of `operations.py` under the doctor: in two heads over a trainable base, and as a layer of a network.

`python -m tests.diagnosis.table` prints the confusion table and every row that disagrees.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gradreg as gr
from gradreg.engine import CURVED, LINEAR, PARTLY, PIECEWISE, RAISES
from gradreg.engine._curvature import curvature
from tests.diagnosis.operations import OPERATIONS, Operation

LAYERS = {"activation", "attention", "dropout", "layer", "norm", "pad", "param", "pool", "rnn"}
FLAT = {"zero", "none", "detached"}
EXPECTED = {"smooth": {CURVED}, "partly": {PARTLY}, "raises": {RAISES}, **{key: {LINEAR, PIECEWISE} for key in FLAT}}
ORDER = (RAISES, CURVED, PARTLY, PIECEWISE, LINEAR)


class Head(nn.Module):
    """One operation and a linear combination of what it gives."""

    def __init__(self, operation: Operation, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.op = operation.make()
        self.last = nn.Parameter(torch.randn(1200))

    def forward(self, x: Tensor) -> Tensor:
        (first, *_) = [leaf for leaf in pytree.tree_leaves(self.op(x)) if isinstance(leaf, Tensor)]
        return first.flatten() @ self.last[: first.numel()].to(first)


class Base(nn.Module):
    """A trainable linear layer to inputs of the shape that an operation needs."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape = shape
        self.first = nn.Linear(5, torch.Size(shape[1:]).numel())
        nn.init.normal_(self.first.weight, std=0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).view(-1, *self.shape[1:])


def dot_product(model: gr.SharedBase, x: Tensor) -> Tensor:
    """The penalty of the seed, by hand."""
    features = model.base(x)
    one, other = (torch.autograd.grad(h(features.clone()), features, create_graph=True)[0] for h in model.heads)
    return (one * other).sum()


def curvature_penalty(model: gr.SharedBase, x: Tensor) -> Tensor:
    """A penalty on second derivatives with respect to features, by hand: training on it needs third ones."""
    features = model.base(x)
    (slope,) = torch.autograd.grad(model.heads[0](features.clone()), features, create_graph=True)
    along = torch.linspace(-1, 1, slope.numel(), dtype=slope.dtype).view_as(slope).sin()
    (curved,) = torch.autograd.grad((slope * along).sum(), features, create_graph=True)
    return curved.square().sum()


class Network(nn.Module):
    def __init__(self, base: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.base, self.head = base, head


def input_gradient(model: Network, x: Tensor) -> Tensor:
    """A penalty on input gradients, by hand."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.head(model.base(x)), x, create_graph=True)
    return gradient.square().sum()


def make_heads(operation: Operation) -> tuple[gr.SharedBase, Tensor]:
    model = gr.SharedBase(Base(operation.shape), [Head(operation, 1), Head(operation, 2)])
    return model, torch.randn(operation.shape[0], 5, generator=torch.Generator().manual_seed(3))


def make_network(operation: Operation) -> tuple[Network, Tensor]:
    return Network(Base(operation.shape), Head(operation, 1)), torch.randn(
        operation.shape[0], 5, generator=torch.Generator().manual_seed(3)
    )


def measured_class(operation: Operation) -> str:
    """The class of an operation by its own second derivative, as the doctor measures it."""
    model, x = make_heads(operation)
    model, x = model.double(), x.double()

    def run(points: list[Tensor]) -> list[Tensor]:
        leaves = pytree.tree_leaves(model.heads[0].op(points[0]))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    return curvature(run, [model.base(x)]).kind


def as_expected(operation: Operation, found: str) -> bool:
    return found in EXPECTED[operation.second]


def heads_problem(operation: Operation, report: Any) -> str:
    """What is wrong with the report on two heads with this operation over a trainable base; empty if nothing is."""
    base = report.parameters["base.first.weight"].status
    named = {cause.name.rpartition(".op")[0] or cause.name for cause in report.causes}
    if operation.second == "raises":
        good = base == "unsupported" and bool(report.causes)
    elif operation.second in FLAT:
        good = base in ("zero", "disconnected") and not report.ok and {"heads.0", "heads.1"} <= named
    else:
        good = report.ok and base in ("ok", "partly_zero")
    return "" if good else f"{operation.name} ({operation.second}): base is {base}, causes {named}"


def network_problem(operation: Operation, report: Any) -> str:
    """What is wrong with the report on the operation as a layer under a penalty on input gradients."""
    weight = report.parameters["base.first.weight"].status
    if operation.second == "raises":
        good = weight == "unsupported" and bool(report.causes)
    else:
        good = report.ok and weight in ("ok", "partly_zero")
    return "" if good else f"{operation.name} ({operation.second}): weight is {weight}, {report}"


def main() -> int:
    """Print the confusion table and all rows that disagree."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[tuple[str, str]] = Counter()
    problems = []
    for operation in OPERATIONS.values():
        found = measured_class(operation)
        counts[operation.second, found] += 1
        if not as_expected(operation, found):
            problems.append(f"class: {operation.name}: {operation.second} is {found}")
        problems.append(heads_problem(operation, gr.check_double_backward(*make_heads(operation), dot_product)))
        if operation.kind in LAYERS:
            report = gr.check_double_backward(*make_network(operation), input_gradient)
            problems.append(network_problem(operation, report))
    print(f"{'table':<10}" + "".join(f"{kind:>18}" for kind in ORDER))
    for second in ("smooth", "partly", "zero", "none", "detached", "raises"):
        print(f"{second:<10}" + "".join(f"{counts[second, kind]:>18}" for kind in ORDER))
    listed = [problem for problem in problems if problem]
    print("\n".join(listed) or "no disagreement")
    return len(listed)


if __name__ == "__main__":
    sys.exit(bool(main()))
