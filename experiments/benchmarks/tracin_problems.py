"""Models, data and checkpoints that the contestants of `tracin.py` share, and the truth they are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

__all__ = ["PROBLEMS", "Problem", "load_problem", "truth"]

RATES = (0.1, 0.05, 0.02)


class Classifier(nn.Module):
    """A BERT classifier of token ids; 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=1000,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=4,
            attn_implementation="eager",  # the one that every contestant can differentiate
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bert(input_ids=ids, attention_mask=(ids != 0).long()).logits


def mlp(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(found.data).float()[order] / 16, torch.from_numpy(found.target).long()[order]


def images() -> tuple[Tensor, Tensor]:
    x, y = digits()
    return x.unflatten(1, (8, 8)), y


def texts() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (576,), generator=generator)
    ids = torch.randint(1, 1000, (576, 64), generator=generator)
    ids[:, ::4] = 10 * (y[:, None] + 1) + ids[:, ::4] % 10  # a few words that tell the label
    lengths = torch.randint(32, 65, (576, 1), generator=generator)
    return torch.where(torch.arange(64) < lengths, ids, torch.zeros_like(ids)), y


@dataclass(frozen=True)
class Recipe:
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    train: int
    epochs: int = 4
    chunk: int = 128  # rows at a time where whole gradients are built
    corner: tuple[int, int] = (64, 256)  # tests and training rows that are compared with the truth


PROBLEMS = {
    "MLP 64-64-10": Recipe(lambda: mlp(64, 64, 10), digits, 1437),
    "MLP 64-256-256-10": Recipe(lambda: mlp(64, 256, 256, 10), digits, 1437),
    "MLP 64-1024-1024-10": Recipe(lambda: mlp(64, 1024, 1024, 10), digits, 1437),
    "small CNN": Recipe(small_cnn, images, 1437),
    "BERT 4 x 256": Recipe(Classifier, texts, 512, epochs=1, chunk=16, corner=(16, 64)),
}


@dataclass
class Problem:
    """One model with checkpoints on disk, training rows and tests."""

    name: str
    model: nn.Module
    checkpoints: list[Path]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    chunk: int
    corner: tuple[int, int]

    def load(self, model: nn.Module, path: Path) -> float:
        """Load a checkpoint; return its learning rate."""
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        model.eval()
        return float(saved["learning_rate"])


def load_problem(name: str, folder: Path) -> Problem:
    """Make a problem; checkpoints are trained once and kept in the folder."""
    recipe = PROBLEMS[name]
    x, y = recipe.data()
    torch.manual_seed(0)
    model = recipe.make()
    train, test = (x[: recipe.train], y[: recipe.train]), (x[recipe.train :], y[recipe.train :])
    paths = [folder / f"{name.replace(' ', '-')}-{number}.pt" for number in range(len(RATES))]
    if not all(path.exists() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        for path, rate in zip(paths, RATES, strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            for _ in range(recipe.epochs):
                for rows in torch.randperm(recipe.train, generator=torch.Generator().manual_seed(0)).split(64):
                    optimizer.zero_grad()
                    F.cross_entropy(model(train[0][rows]), train[1][rows]).backward()
                    optimizer.step()
            torch.save({"model": model.state_dict(), "learning_rate": rate}, path)
    return Problem(name, model.eval(), paths, train, test, recipe.chunk, recipe.corner)


def per_example(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]]:
    """Return the function from parameters and rows to the gradients of every row, by `vmap(grad)`."""

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    return vmap(grad(loss), in_dims=(None, 0, 0))


def truth(problem: Problem, folder: Path) -> Tensor:
    """Return the scores of the first tests and training rows in float64; computed once and kept in the folder."""
    file = folder / f"{problem.name.replace(' ', '-')}-truth.pt"
    tests, rows = problem.corner
    if not file.exists():
        model = problem.model.double()
        total = torch.zeros(tests, rows, dtype=torch.float64)
        for path in problem.checkpoints:
            rate = problem.load(model, path)
            sides = []
            for (x, y), count in ((problem.test, tests), (problem.train, rows)):
                x = x.double() if x.is_floating_point() else x
                sides.append([_flat_gradient(model, x[i : i + 1], y[i : i + 1]) for i in range(count)])
            for t, test in enumerate(sides[0]):
                total[t] += rate * torch.stack([test @ train for train in sides[1]])
        torch.save(total, file)
    return torch.load(file, weights_only=True)


def _flat_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    parameters = list(model.parameters())
    found = torch.autograd.grad(F.cross_entropy(model(x), y), parameters, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(found, parameters, strict=True)]
    )
