"""Traps of double backward, part C: operations and contexts without it, none of which stays silent.

Not here, for they need another device: C2 (CUDA attention), C8 (cuDNN), C16 (further kernels). C6 is no trap: it is what works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

import gradreg as gr
from gradreg.errors import (
    CompatibilityError,
    SlowRouteWarning,
)
from tests.diagnosis.small import (
    INPUT_GRADIENT,
    advice,
    by_hand,
    examples,
    kinds,
    named,
    status,
    tokens,
    two_heads,
)

LAST = gr.logit(0)


class Attending(nn.Module):
    """Linear, attention in one of several ways, mean over tokens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(4, 4), nn.Linear(4, 2)
        if how == "layer":
            self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        if how == "module":
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "layer":
            x = self.layer(x)
        elif self.how == "module":
            x, _ = self.attention(x, x, x, need_weights=False)
        else:
            x = x.unsqueeze(1)  # heads
            x = F.scaled_dot_product_attention(x, x.flip(-1), x.sin(), is_causal=True).squeeze(1)
        return self.last(x.mean(1))


@pytest.mark.parametrize(
    ("how", "name"),
    [("function", ""), ("module", "attention"), ("layer", "layer.self_attn")],
    ids=["c1", "c3", "c3_layer"],
)
def test_c1_c3_attention(how: str, name: str) -> None:
    model = Attending(how)
    report = gr.check_double_backward(model, tokens(), by_hand)
    assert status(report, "") == {"unsupported"}
    assert named(report) == {name}
    assert "sdpa_kernel(SDPBackend.MATH)" in advice(report)
    assert "differentiable=True" in advice(report)
    report = gr.check_double_backward(model, tokens(), INPUT_GRADIENT)  # gradreg chooses the kernel
    assert report.ok
    assert report.parameters["first.weight"].status == "ok"


def test_c4_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForSequenceClassification(config)
    batch = gr.Batch({"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])})
    penalty = (gr.logit(0), gr.Activations("bert.embeddings"))
    report = gr.check_double_backward(model, batch, penalty)
    assert report.ok, str(report)
    assert report.parameters["bert.encoder.layer.0.attention.self.query.weight"].status == "ok"


def test_c5_a_compiled_model() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    compiled = torch.compile(net, backend="eager")
    report = gr.check_double_backward(compiled, examples(), INPUT_GRADIENT)
    assert kinds(report) == {"OptimizedModule"}
    assert status(report, "") == {"unsupported"}
    assert "model._orig_mod" in advice(report)
    with pytest.raises(CompatibilityError, match="compiled"):
        gr.gradients(compiled, examples(), *INPUT_GRADIENT, differentiable=True)
    head = gr.SharedBase(nn.Linear(6, 4), [nn.Linear(4, 2), torch.compile(nn.Linear(4, 2), backend="eager")])
    assert named(gr.check_double_backward(head, examples(), gr.regularizers.DiverseHeads())) == {"heads.1"}


class Recomputing(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=self.reentrant))


def test_c7_activation_checkpointing() -> None:
    report = gr.check_double_backward(Recomputing(True), examples(), INPUT_GRADIENT)
    assert status(report, "") == {"unsupported"}
    assert "use_reentrant=False" in advice(report)
    assert gr.check_double_backward(Recomputing(False), examples(), INPUT_GRADIENT).ok
    with pytest.warns(SlowRouteWarning):
        found = gr.gradients(Recomputing(False), examples(), LAST, gr.Params("last.*"), differentiable=True)
    assert found["last.weight"].shape == (7, 2, 5)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (F.multi_margin_loss, torch.arange(7) % 3),
        (F.multilabel_margin_loss, torch.tensor([[0, 2, -1]] * 7)),
    ],
)
def test_c9_losses_without_double_backward(loss: Callable[..., Tensor], targets: Tensor) -> None:
    batch = gr.Batch(examples(), targets)
    report = gr.check_double_backward(two_heads(nn.Tanh), batch, (gr.loss(loss), gr.Features()))
    assert status(report, "") == {"unsupported"}
    assert kinds(report) == {loss.__name__}
    assert "MultiLabelSoftMarginLoss" in advice(report)


class Around(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 7) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, 6), nn.Linear(width, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def test_c10_distances() -> None:
    center = torch.randn(7, 6)
    for function, kind in ((lambda x: torch.cdist(x, center.to(x)), "cdist"), (lambda x: _pairs(x), "pdist")):
        report = gr.check_double_backward(Around(function), examples(), by_hand)
        assert kinds(report) == {kind}
        assert "((a - b) ** 2).sum(-1)" in advice(report)
    written = Around(lambda x: ((x[:, None] - center.to(x)) ** 2).sum(-1).add(1e-6).sqrt())
    assert gr.check_double_backward(written, examples(), INPUT_GRADIENT).ok


def _pairs(x: Tensor) -> Tensor:
    return F.pdist(x)[: len(x)].unsqueeze(0).expand(len(x), -1)


class Bag(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.bag(ids).tanh())


def test_c11_embedding_bag() -> None:
    ids = torch.tensor([[0, 1], [2, 3]])
    report = gr.check_double_backward(Bag(), ids, (LAST, gr.Params("bag.weight")))
    assert status(report, "") == {"unsupported"}
    assert "EmbeddingBag" in str(report)
    assert "sum" in str(report)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_c12_embeddings_that_rewrite_or_rescale(option: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Embedding(5, 4, **option), nn.Flatten(), nn.Tanh(), nn.Linear(12, 2))
    with pytest.raises(CompatibilityError, match=next(iter(option))):
        gr.gradients(net, torch.zeros(2, 3, dtype=torch.long), LAST, gr.Params("0.weight"), differentiable=True)


def test_c13_grid_sample() -> None:
    picture = torch.randn(7, 1, 4, 4)
    net = Around(lambda x: F.grid_sample(picture.to(x), x.view(7, 1, 3, 2).tanh(), align_corners=False).flatten(1), 3)
    report = gr.check_double_backward(net, examples(), by_hand)
    assert report.ok
    assert report.parameters["first.weight"].status == "ok"


def test_c14_igamma() -> None:
    net = Around(lambda x: torch.special.gammainc(x.exp(), torch.ones_like(x)), 6)
    report = gr.check_double_backward(net, examples(), by_hand)
    assert status(report, "") == {"unsupported"}
    assert "igamma: input" in str(report)


def test_c15_old_weight_norm_after_a_forward() -> None:
    torch.manual_seed(0)
    old = nn.Sequential(weight_norm_old(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 2))
    torch.manual_seed(0)
    new = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 2))
    old(examples())
    one = gr.check_double_backward(old, examples(), INPUT_GRADIENT)
    other = gr.check_double_backward(new, examples(), INPUT_GRADIENT)
    assert one.ok
    assert other.ok
    assert one.value == pytest.approx(other.value)
    assert one.parameters["0.weight_v"].norm == pytest.approx(
        other.parameters["0.parametrizations.weight.original1"].norm
    )


def weight_norm_old(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning):
        return weight_norm(layer)
