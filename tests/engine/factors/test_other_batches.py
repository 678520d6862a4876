"""What was learned of a model on one batch does not give wrong numbers on the next one."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import collect_factors

LABELS = gr.loss(F.cross_entropy)
IGNORED = -100


class Body(nn.Module):
    """A layer, a head, and a forward that is given."""

    def __init__(self, forward: Callable[[Body, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.o = nn.Linear(5, 3)
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def sorted_by_size(body: Body, x: Tensor) -> Tensor:
    order = x.flatten(1).sum(1).argsort()
    return body.o(body.a(x[order]).tanh()[order.argsort()])


def experts(body: Body, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), 3)
    for module, chosen in ((nn.Sequential(body.a, body.o), x[:, 0] > 0), (body.e, x[:, 0] <= 0)):
        out = out.index_put((chosen.nonzero()[:, 0],), module(x[chosen]))
    return out


def rolled(body: Body, x: Tensor) -> Tensor:
    return body.o(body.a(x.roll(1, 0)).tanh().roll(-1, 0))


def rolled_by_slices(body: Body, x: Tensor) -> Tensor:
    h = body.a(torch.cat([x[1:], x[:1]])).tanh()
    return body.o(torch.cat([h[-1:], h[:-1]]))


def rows_of_time(body: Body, x: Tensor) -> Tensor:
    return body.o(body.a(x.reshape(-1, 5)).tanh().reshape(x.shape).mean(1))


def time_first(body: Body, x: Tensor) -> Tensor:
    rows = x.transpose(0, 1)
    return body.o(body.a(rows.reshape(-1, 5)).tanh().reshape(rows.shape).mean(0))


def positions(body: Body, x: Tensor) -> Tensor:
    return body.o((body.a(x) + body.p(torch.arange(x.shape[1]))).tanh().mean(1))


def channels_first(body: Body, x: Tensor) -> Tensor:
    return body.o(body.n(body.c(body.a(x).T[None]))[0].T)


def unbatched(body: Body, x: Tensor) -> Tensor:
    return body.o(body.c(body.a(x).T).T)


def vectors(n: int) -> gr.Batch:
    return gr.Batch(torch.randn(n, 5, dtype=torch.float64), torch.arange(n) % 3)


def ordered(n: int) -> gr.Batch:
    batch = vectors(n)
    return batch[batch.inputs.sum(1).argsort()]


def positive(n: int) -> gr.Batch:
    batch = vectors(n)
    return gr.Batch(batch.inputs.abs(), batch.targets)


def ignored(n: int) -> gr.Batch:
    return gr.Batch(vectors(n).inputs, torch.full((n,), IGNORED))


def mixed(n: int) -> gr.Batch:
    batch = positive(n)
    batch.inputs[3:] *= -1
    return batch


def of_length(length: int) -> Callable[[int], gr.Batch]:
    return lambda n: gr.Batch(torch.randn(n, length, 5, dtype=torch.float64), torch.arange(n) % 3)


Batches = list[tuple[Callable[[int], gr.Batch], int]]
TABLE: dict[str, tuple[Callable[[], nn.Module], Batches]] = {
    "order found in the data": (lambda: Body(sorted_by_size), [(ordered, 4), (vectors, 6)]),
    "experts": (lambda: Body(experts, e=nn.Linear(5, 3)), [(positive, 4), (mixed, 6), (vectors, 6)]),
    "one example first": (lambda: Body(rolled_by_slices), [(vectors, 1), (vectors, 2), (vectors, 6)]),
    "no gradients first": (lambda: Body(rolled_by_slices), [(ignored, 5), (vectors, 6)]),
    "rolled": (lambda: Body(rolled), [(vectors, 1), (vectors, 6)]),
    "flattened": (lambda: Body(rows_of_time), [(of_length(length), 5) for length in (1, 4, 6, 1, 5)]),
    "flattened, time first": (lambda: Body(time_first), [(of_length(length), 5) for length in (1, 4, 6, 1, 5)]),
    "positions": (lambda: Body(positions, p=nn.Embedding(9, 5)), [(of_length(length), 5) for length in (6, 1, 5)]),
    "examples as pixels": (
        lambda: Body(channels_first, c=nn.Conv1d(5, 5, 1), n=nn.BatchNorm1d(5)).eval(),
        [(vectors, 5), (vectors, 1)],
    ),
    "unbatched convolution": (lambda: Body(unbatched, c=nn.Conv1d(5, 5, 1)), [(vectors, 5)]),
}


def plain(model: nn.Module, batch: gr.Batch) -> dict[str, Tensor]:
    losses = F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")
    named = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
        for loss in losses
    ]
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(named)}


@pytest.mark.parametrize("name", TABLE)
def test_batches_one_after_the_other(name: str) -> None:
    torch.manual_seed(0)
    make, batches = TABLE[name]
    model = make().double()
    for batch in (draw(n) for draw, n in batches):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gr.errors.SlowRouteWarning)  # experts are chosen by data
            found, truth = gr.gradients(model, batch, LABELS, gr.Params("*")), plain(model, batch)
        for key, expected in truth.items():
            torch.testing.assert_close(found[key], expected, rtol=1e-9, atol=1e-12, msg=f"{key} for {batch}")


def test_random_numbers_drawn_anew_are_noticed() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.w, 0.02)

    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), nn.Linear(5, 3)).double()
    batch = vectors(64)
    factors = [collect_factors(model, batch, LABELS, gr.Params("*")) for _ in range(3)]
    assert {row.name: row.rule for row in factors[-1].coverage}["0.w"] == "gradients"


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3)).double()
    batch = gr.Batch(torch.randint(9, (5, 2)), torch.arange(5) % 3)
    found = gr.gradients(model, batch, LABELS, gr.Params("*"))
    for key, expected in plain(model, batch).items():
        torch.testing.assert_close(found[key], expected.to_dense())
