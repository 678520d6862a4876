"""The modules of the zoo that are more than a `nn.Sequential`: each does one thing that breaks naive gradient code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Reused(nn.Module):
    """Calls one module object three times in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        out: Tensor = self.last(x)
        return out


class TwoNames(nn.Module):
    """Holds one module object under two names and calls it under both (see pytorch/pytorch#164759)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.softplus(self.second(torch.tanh(self.first(x)))))
        return out


class TiedWeights(nn.Module):
    """Shares one Parameter between two modules of different kinds, as language models tie their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3, bias=False)
        self.decoder = nn.Linear(4, 3)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(torch.tanh(F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.T)))
        return out


class UnusedAndFrozen(nn.Module):
    """Has a module that is never called, a parameter that does not matter, and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.unused = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(5, 2)
        self.first.bias.requires_grad_(False)
        self.last.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out + 0 * self.gain


class DictInputs(nn.Module):
    """Takes keyword arguments, one of them a constant and one not floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(2, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, *, a: Tensor, b: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:
        hidden = torch.tanh(self.left(a) * scale + self.right(b).sin()) * (1 + ids[:, None])
        out: Tensor = self.last(hidden)
        return out


class MappingInput(nn.Module):
    """Takes one mapping as its only argument, and returns a mapping without logits."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.score = nn.Linear(4, 3)
        self.other = nn.Linear(4, 2)

    def forward(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = torch.tanh(self.left(named["a"])) * named["b"]
        return {"other": self.other(hidden), "score": self.score(hidden)}


class TupleInputs(nn.Module):
    """Takes a float and an integer tensor by position and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x) * self.embedding(ids).mean(1))
        return hidden, self.last(hidden)


class Counting(nn.Module):
    """Changes a buffer in its forward and then uses it: a second call gives another result."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.last(torch.tanh(self.first(x) * (1 + 0.5 * self.calls)))
        return out


class RunningStatistics(nn.Module):
    """Writes batch statistics into buffers, by assignment and by an in-place update; neither reaches the output."""

    average: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.average.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        self.largest = torch.maximum(self.largest, hidden.detach().max())
        out: Tensor = self.last(hidden)
        return out


class TupleRecurrent(nn.Module):
    """A GRU, whose output is a tuple; the second part goes on, so the first one has a partial gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps, state = self.gru(x)
        out: Tensor = self.last(steps.mean(1) + state[-1])
        return out


class TimeMajor(nn.Module):
    """A GRU with time first, batch second."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.gru(x.transpose(0, 1))
        out: Tensor = self.last(steps.mean(0))
        return out


class Attention(nn.Module):
    """Multi-head attention, with or without returned weights, and a key padding mask among the inputs."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)
        self.need_weights = need_weights

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=self.need_weights)
        out: Tensor = self.last(mixed.mean(1))
        return out


class BareAttention(nn.Module):
    """Scaled dot-product attention as a function, called with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 12)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.last(mixed.mean(1))
        return out


class Transformer(nn.Module):
    """The stock transformer encoder."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            4, 2, dim_feedforward=5, dropout=0.1, activation="gelu", batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.encoder(x).mean(1))
        return out


class Residual(nn.Module):
    """A residual network whose one normalization is reused in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.gelu(block(self.norm(x)))
        out: Tensor = self.last(self.norm(x))
        return out


class BareParameters(nn.Module):
    """Parameters of its own, in a list, a dictionary, and one without axes; no submodule is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))])
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.randn(4, 2))})
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.weight * self.scales[0]) + self.scales[1]
        out: Tensor = hidden @ self.named["last"] / self.temperature
        return out


class Branching(nn.Module):
    """Looks at the values of its activations in Python, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if bool(torch.isfinite(hidden).all()):
            hidden = hidden * 2
        out: Tensor = self.last(hidden)
        return out


class Checkpointed(nn.Module):
    """Recomputes its first block in the backward pass, which torch.func refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
        out: Tensor = self.last(hidden)
        return out


class _OldCube(torch.autograd.Function):
    """x^3 in the old style, without `setup_context`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = gradient * 3 * x**2
        return slope


class OldFunction(nn.Module):
    """Uses an old-style custom autograd Function, which torch.func refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(_OldCube.apply(self.first(x)))
        return out


class Scaled(nn.Module):
    """A head whose behavior hangs on a plain number, which no parameter shows."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.factor * self.first(x)))
        return out


class Flat(nn.Module):
    """Gives one number per example without a class axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x))).squeeze(-1)
        return out


class MeanOverTokens(nn.Module):
    """`[n, T, d]` to `[n, d]`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@dataclass
class FakeOutput:
    """What a language model library returns: an object with logits."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...] = ()


class _FakeLanguageModel(nn.Module):
    """Token ids and an attention mask by keyword; refuses labels, which belong to `of`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.last = nn.Linear(4, 7, bias=False)
        self.last.weight = self.embedding.weight

    def hidden(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.embedding(input_ids) * attention_mask.unsqueeze(-1)
        past = tokens.cumsum(1) / torch.arange(1, tokens.shape[1] + 1).unsqueeze(-1)
        mixed: Tensor = torch.tanh(self.mix(past)) + tokens
        return mixed


class FakeForCausalLM(_FakeLanguageModel):
    """A causal language model, as its name says; its last weight is its embedding."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> FakeOutput:
        if labels is not None:
            raise RuntimeError("labels must not reach the model")
        hidden = self.hidden(input_ids, attention_mask)
        return FakeOutput(self.last(hidden), (hidden,))


class FakeForTokenClassification(_FakeLanguageModel):
    """The same as a classifier of tokens, which returns a mapping."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(input_ids, attention_mask)
        return {"hidden": hidden, "logits": self.last(hidden)}
