"""Layer factors against a plain loop over examples, on the architectures that people have."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import Factors, collect_factors
from gradreg.testing import reference

N, M = 5, 3
LABELS = gr.loss(F.cross_entropy)


def loop(model: nn.Module, batch: gr.Batch, of: Any) -> dict[str, Tensor]:
    """Gradients by one ordinary backward per example."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    rows = []
    for i in range(len(batch)):
        example = batch[i : i + 1]
        inputs = example.inputs
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        scalar = of(outputs, example).sum()
        rows.append(torch.autograd.grad(scalar, list(named.values()), allow_unused=True, materialize_grads=True))
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(named)}


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten(1) for value in gradients.values()], 1)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def check(model: nn.Module, a: gr.Batch, b: gr.Batch, of: Any = LABELS, tolerance: float = 1e-10) -> Factors:
    """Compare products, norms, gradients, projections and directions with the loop."""
    one, other = collect_factors(model, a, of, gr.Params("*")), collect_factors(model, b, of, gr.Params("*"))
    truth_one, truth_other = loop(model, a, of), loop(model, b, of)
    expected = flat(truth_one) @ flat(truth_other).T
    assert relative(one.dot(other), expected) < tolerance
    by_parameter = one.dot_by_parameter(other)
    assert by_parameter.keys() == truth_one.keys()
    assert relative(torch.stack(list(by_parameter.values())).sum(0), expected) < tolerance
    assert relative(one.squared_norms(), flat(truth_one).square().sum(1)) < tolerance
    directions = Factors.written_out({name: value * 0.5 for name, value in truth_other.items()})
    assert relative(one.dot(directions), 0.5 * expected) < tolerance
    same = torch.stack(list(one.row_dots_by_parameter(Factors.written_out(truth_one)).values())).sum(0)
    assert relative(same, flat(truth_one).square().sum(1)) < tolerance
    largest = float(flat(truth_one).abs().max())
    for name, value in truth_one.items():
        assert float((one.gradient(name) - value).abs().max()) < tolerance * largest, name
        matrix = value.reshape(len(value), value.shape[1] if value.dim() > 1 else 1, -1)
        left, right = torch.randn(2, matrix.shape[1]).double(), torch.randn(4, matrix.shape[2]).double()
        torch.testing.assert_close(
            one.two_sided(name, left, right), left @ matrix @ right.T, rtol=1e-8, atol=tolerance * 100 * largest
        )
    part = one.select(slice(1, 3))
    assert len(part) == 2
    assert relative(part.dot(other), expected[1:3]) < tolerance
    covered = {row.name: row for row in one.coverage}
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name, row in covered.items() if row.rule is not None} == trainable
    assert sum(row.numel for row in one.coverage) == sum(parameter.numel() for parameter in model.parameters())
    return one


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Tied(nn.Module):
    """Two modules with one weight, each with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.c = nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(x + torch.tanh(self.a(x)))
        return self.c(x)


class Bare(nn.Module):
    """A parameter that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale, self.b = nn.Linear(5, 7), nn.Parameter(torch.rand(7) + 0.5), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * self.scale)


class BareInside(nn.Module):
    """The same, one level down: the pullback of that module alone serves it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Bare(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x)))


class Functional(nn.Module):
    """The weight of a layer is also used without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) + F.linear(x, self.a.weight))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.never = nn.Linear(5, 3), nn.Linear(50, 60)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Tokens(nn.Module):
    """A language model with positions that are the same for all examples, and tied embeddings."""

    def __init__(self, positions: str, padding_idx: int | None = None, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(9, 6, padding_idx=padding_idx), nn.Embedding(7, 6)
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        if tied:
            self.out.weight = self.embed.weight
        self.positions = positions

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1])
        if self.positions == "row":
            place = place.unsqueeze(0)
        h = self.embed(ids) + self.place(place)
        h = h + torch.tanh(self.mix(h)).cumsum(1)
        return self.out(h)


class TimeFirst(nn.Module):
    """Layers that see time first and examples second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.attention, self.c = (
            nn.Linear(5, 8),
            nn.LayerNorm(8),
            nn.MultiheadAttention(8, 2),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x.transpose(0, 1)))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.c(h.mean(0))


class Flattened(nn.Module):
    """Layers that see examples and positions on one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.scale, self.c = nn.Linear(5, 6), nn.LayerNorm(6), nn.PReLU(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.scale(self.norm(self.a(x.reshape(-1, 5))))
        return self.c(h.reshape(len(x), -1, 6).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn, self.out = kind(5, 4, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0].mean(1))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu_(self.a(x)))


class Experts(nn.Module):
    """Each example goes to one of two layers: which rows a layer sees depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.out = nn.ModuleList([nn.Linear(5, 6), nn.Linear(5, 6)]), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 6)
        for k, expert in enumerate(self.experts):
            rows = ((x.sum(1) > 0).long() == k).nonzero().flatten()
            if len(rows):
                h = h.index_copy(0, rows, torch.tanh(expert(x[rows])))
        return self.out(h)


class Parametrized(nn.Module):
    def __init__(self, old: bool) -> None:
        super().__init__()
        if old:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.a = nn.utils.weight_norm(nn.Linear(5, 6))
        else:
            self.a = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6))
        self.b = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model[0].weight.requires_grad_(False)
    return model


def conv(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


def vectors(n: int) -> gr.Batch:
    return gr.Batch(torch.randn(n, 5).double(), torch.randint(0, 3, (n,)))


def sequences(n: int) -> gr.Batch:
    return gr.Batch(torch.randn(n, 4, 5).double(), torch.randint(0, 3, (n,)))


def images(*shape: int) -> Callable[[int], gr.Batch]:
    return lambda n: gr.Batch(torch.randn(n, *shape).double(), torch.randint(0, 3, (n,)))


@dataclass(frozen=True)
class Row:
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], gr.Batch] = vectors
    of: Any = LABELS
    gradients: tuple[str, ...] = ()  # parameters that no layer's rule can serve


def _activated(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


TOKEN_LOSS = gr.token_loss(F.cross_entropy)


def token_ids(n: int) -> gr.Batch:
    ids = torch.randint(1, 9, (n, 6))
    ids[0, 4:] = 0
    labels = ids.clone()
    labels[0, 4:] = -100
    return gr.Batch(ids, labels)


TABLE = [
    Row(
        "mlp",
        lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7, bias=False), nn.Tanh(), nn.Linear(7, 3)),
    ),
    Row("positions", lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)), sequences),
    Row("tied", Tied),
    Row("reused", Reused),
    Row("bare parameter", Bare),
    Row("bare parameter inside", BareInside),
    Row("used as a function", Functional, gradients=("a.weight",)),
    Row("used as a function inside", lambda: nn.Sequential(Functional(), nn.Tanh(), nn.Linear(3, 3))),
    Row("unused", Unused),
    Row("frozen", frozen),
    Row("in place", InPlace),
    Row("hooks", hooked),
    Row("parametrized", lambda: Parametrized(old=False)),
    Row("old weight norm", lambda: Parametrized(old=True)),
    Row("experts", Experts, gradients=("experts.0.weight", "experts.0.bias", "experts.1.weight", "experts.1.bias")),
    Row("time first", TimeFirst, sequences),
    Row("flattened", Flattened, sequences),
    Row("GRU", lambda: Recurrent(nn.GRU), sequences),
    Row("LSTM", lambda: Recurrent(nn.LSTM), sequences),
    Row("conv1d", conv(nn.Conv1d(2, 4, 3, stride=2, padding=1)), images(2, 9)),
    Row("conv2d groups", conv(nn.Conv2d(2, 4, 3, groups=2)), images(2, 5, 5)),
    Row("conv2d circular", conv(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")), images(2, 5, 5)),
    Row("conv2d reflect", conv(nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="reflect")), images(2, 5, 5)),
    Row("conv2d replicate", conv(nn.Conv2d(2, 4, (3, 2), padding=1, padding_mode="replicate")), images(2, 5, 5)),
    Row("conv2d same", conv(nn.Conv2d(2, 4, (3, 4), padding="same", dilation=2)), images(2, 6, 5)),
    Row("conv2d stride", conv(nn.Conv2d(2, 4, 3, stride=2, bias=False)), images(2, 6, 6)),
    Row("conv2d dilation", conv(nn.Conv2d(2, 4, 2, dilation=2)), images(2, 5, 5)),
    Row("conv3d", conv(nn.Conv3d(2, 3, 2, padding=1, stride=(1, 2, 1))), images(2, 3, 4, 3)),
    Row("transposed 1d", conv(nn.ConvTranspose1d(2, 4, 3, stride=2, padding=1, output_padding=1)), images(2, 5)),
    Row("transposed 2d", conv(nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2, dilation=2)), images(4, 3, 4)),
    Row("transposed 3d", conv(nn.ConvTranspose3d(2, 3, 2, stride=2, bias=False)), images(2, 2, 3, 2)),
    Row(
        "norms",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.GroupNorm(2, 4),
            nn.InstanceNorm2d(4, affine=True),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(36, 6),
            nn.LayerNorm(6),
            nn.RMSNorm(6),
            nn.PReLU(),
            nn.Linear(6, 3),
        ).eval(),
        images(2, 5, 5),
    ),
    Row("bilinear", lambda: _activated(Lambda(lambda x: x), BilinearHead())),
    Row("token model", lambda: Tokens("row"), token_ids, TOKEN_LOSS),
    Row("token model, padding", lambda: Tokens("vector", padding_idx=0, tied=False), token_ids, TOKEN_LOSS),
    Row(
        "transformer encoder",
        lambda: nn.Sequential(
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0), 2, enable_nested_tensor=False
            ),
            nn.Flatten(),
            nn.Linear(32, 3),
        ),
        images(4, 8),
    ),
    Row("heads", lambda: gr.SharedBase(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), [nn.Linear(4, 3) for _ in range(5)])),
]


class BilinearHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Bilinear(5, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x, x.tanh())


def made(row: Row) -> tuple[nn.Module, gr.Batch, gr.Batch]:
    torch.manual_seed(0)
    model = row.make().double()
    a, b = row.batch(N), row.batch(M)
    with torch.no_grad():
        model(a.inputs)  # lazy layers
    return model, a, b


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_against_the_loop(row: Row) -> None:
    model, a, b = made(row)
    if row.name == "heads":
        one = collect_factors(model, a, row.of, gr.Params("*"))
        truth = reference.gradients(model, a, row.of, gr.Params("*"))
        assert relative(one.dot(one), flat(truth) @ flat(truth).T) < 1e-10
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gr.errors.SlowRouteWarning)
            one = check(model, a, b, row.of)
    assert {entry.name for entry in one.coverage if entry.rule == "gradients"} == set(row.gradients)
