"""The toy of the bug table, the brute-force truth, and other small models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr

DOUBLE = torch.float64


def _toy() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(11, 5, generator=generator, dtype=DOUBLE)
    labels = torch.randint(0, 3, (11,), generator=generator)
    test_inputs = torch.randn(4, 5, generator=generator, dtype=DOUBLE)
    return inputs, labels, test_inputs, torch.randint(0, 3, (4,), generator=generator)


X, Y, XT, YT = _toy()
TRAIN, TEST = (X, Y), (XT, YT)
LOSS = gr.loss(F.cross_entropy)


def made(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model built after seeding, in float64: numbers are drawn in float64, as the table has them."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DOUBLE)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def toy_model(seed: int = 0) -> nn.Module:
    return made(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), seed)


def here(model: nn.Module, learning_rate: float = 1.0) -> gr.Checkpoint:
    """The model as it is."""
    return gr.Checkpoint(model.state_dict(), learning_rate)


def tracin(model: nn.Module, of: Any = LOSS, **options: Any) -> gr.TracIn:
    """TracIn of the model as it is, at learning rate 1."""
    return gr.TracIn(model, of, here(model), **options)


Criterion = Callable[[Any, Tensor], Tensor]


def summed_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="sum")


def brute_gradients(
    model: nn.Module,
    inputs: Sequence[Any] | Tensor,
    labels: Sequence[Any] | Tensor,
    fn: Criterion = summed_cross_entropy,
) -> Tensor:
    """The gradient of every example's own loss, alone, over all trainable parameters: `[n, P]`."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flags = [module.training for module in model.modules()]
    model.eval()
    rows = []
    for x, y in zip(inputs, labels, strict=True):
        value = fn(model(x[None]), y[None])
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        pairs = zip(found, parameters, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    for module, flag in zip(model.modules(), flags, strict=True):
        module.training = flag
    return torch.stack(rows)


def brute(model: nn.Module, train: Any = TRAIN, test: Any = TEST, fn: Criterion = summed_cross_entropy) -> Tensor:
    """Scores of the model as it is, at learning rate 1."""
    return brute_gradients(model, *test, fn) @ brute_gradients(model, *train, fn).T


def assert_scores(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Demand equality relative to the largest score."""
    assert found.shape == expected.shape
    error = float((found.to(expected) - expected).abs().max() / expected.abs().max())
    assert error < tolerance, error


def assert_table(scores: Tensor, first: float, total: float) -> None:
    """Demand the two figures of the table, which have six decimals."""
    assert abs(float(scores[0, 0]) - first) < 6e-7
    assert abs(float(scores.sum()) - total) < 6e-7


class TokenModel(nn.Module):
    """Next-token logits from one embedding, tied to the output."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.e = nn.Embedding(9, 6, padding_idx=padding_idx)
        self.o = nn.Linear(6, 9, bias=False)
        self.o.weight = self.e.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.o(torch.tanh(self.e(ids)))
        return logits


SEQUENCES = [[1, 2], [3, 4, 5, 6, 7], [2, 2, 8, 1]]
TOKEN_LOSS = gr.loss(F.cross_entropy, shift=True)


def token_rows(*which: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.tensor(SEQUENCES[i]), torch.tensor(SEQUENCES[i])) for i in which or range(3)]


def padded_tokens(*which: int) -> tuple[Tensor, Tensor]:
    """All sequences in one tensor, padded with id 0 and label -100."""
    ids, labels = torch.zeros(3, 5, dtype=torch.long), torch.full((3, 5), -100)
    for row, sequence in enumerate(SEQUENCES):
        ids[row, : len(sequence)] = labels[row, : len(sequence)] = torch.tensor(sequence)
    rows = list(which or range(3))
    return ids[rows], labels[rows]


class Reused(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.tanh(self.a(torch.tanh(self.a(x)))))
        return out


class Tied(nn.Module):
    """Two layers that share their weight and not their bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.c = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


class Scaled(nn.Module):
    """A parameter that no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.rand(7) + 0.5)
        self.b = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x)) * self.scale)
        return out


class Unused(nn.Module):
    """A layer that no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.idle = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x)
        return out
