"""Small smooth models in float64, and batches for them, on which the tests of losses over parameters and heads agree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import gradreg as gr
from gradreg.model import swapped

CLASSES = 3


class Transformer(nn.Module):
    """One encoder layer over three tokens of width four; with its layer normalizations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 4)
        self.layer = nn.TransformerEncoderLayer(
            4, 2, dim_feedforward=5, dropout=0.0, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x.view(-1, 3, 2))).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def cnn() -> nn.Module:
    layers = [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Softplus(), nn.Flatten(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def transformer() -> nn.Module:
    return Transformer().double()


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def ensemble() -> gr.Ensemble:
    return gr.Ensemble([mlp(), mlp(), mlp()])


def convolutional_ensemble() -> gr.Ensemble:
    return gr.Ensemble([cnn(), cnn()])


def transformer_ensemble() -> gr.Ensemble:
    return gr.Ensemble([transformer(), transformer()])


def unlike_ensemble() -> gr.Ensemble:
    return gr.Ensemble([mlp(), cnn(), transformer()])


def shared() -> gr.SharedBase:
    heads = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)) for _ in range(3)]
    return gr.SharedBase(nn.Sequential(nn.Linear(6, 4), nn.Tanh()), heads).double()


HEADS: dict[str, Callable[[], nn.Module]] = {
    "ensemble": ensemble,
    "convolutional": convolutional_ensemble,
    "transformers": transformer_ensemble,
    "unlike": unlike_ensemble,
    "shared": shared,
}


def batch(n: int = 6, groups: tuple[int, ...] = (0, 4, 0, 4, 4, 0)) -> gr.Batch:
    """Labels of every class, and two environments unless said otherwise."""
    return gr.Batch(
        torch.randn(n, 6, dtype=torch.float64), torch.arange(n) % CLASSES, groups=torch.tensor((groups * n)[:n])
    )


def three_environments() -> gr.Batch:
    """Environments of three, four and two examples."""
    return batch(9, (7, 2, 5, 2, 7, 2, 5, 7, 2))


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_derivatives(regularizer: gr.Regularizer, model: nn.Module, data: gr.Batch) -> None:
    """First derivatives by gradcheck, second ones by gradgradcheck, with respect to all parameters."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sizes = [parameter.numel() for parameter in named.values()]

    def value(vector: Tensor) -> Tensor:  # one input: the fast mode costs the same for one as for each of many
        parts = vector.split(sizes)
        tensors = {name: part.view_as(parameter) for (name, parameter), part in zip(named.items(), parts, strict=True)}
        with swapped(model, tensors):
            return regularizer(model, data)

    vector = torch.cat([parameter.detach().flatten() for parameter in named.values()]).requires_grad_()
    regularizer(model, data)  # the first call looks at the model's own parameters
    assert gradcheck(value, vector, fast_mode=True)
    assert gradgradcheck(value, vector, fast_mode=True)


def check_equal(value: Tensor, expected: Tensor, model: nn.Module) -> None:
    """Values to 1e-10, and what both send to every parameter."""
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    trained = parameters(model)
    own = torch.autograd.grad(value, trained, allow_unused=True, materialize_grads=True)
    other = torch.autograd.grad(expected, trained, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)
