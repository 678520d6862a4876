"""Saliency, input x gradient, SmoothGrad and expected gradients against plain autograd and known values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from tests.attribution.attribution_models import bert, tokens

Settings = dict[str, Any]


def net(width: int = 3, classes: int = 2) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, classes)).double()


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """`[n, C, *shape]` by one backward per class."""
    x = x.detach().requires_grad_()
    z = model(x)
    return torch.stack([torch.autograd.grad(z[:, c].sum(), x, retain_graph=True)[0] for c in range(z.shape[1])], 1)


class Times(nn.Module):
    """w x^2 with w = 5."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(5.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x[:, 0].square()


def test_input_x_gradient_can_be_trained_on() -> None:
    model, x = Times(), torch.tensor([[2.0]], dtype=torch.float64)
    a = gr.input_x_gradient(model, x, gr.all_logits(), gr.Inputs(), per="feature", differentiable=True)
    assert a.scores.item() == pytest.approx(40)
    (second,) = torch.autograd.grad(a.scores.sum(), model.w)
    assert second.item() == pytest.approx(8)


@pytest.mark.parametrize("chunk_size", [None, 1, 5])
@pytest.mark.parametrize(
    "method", [gr.saliency, gr.smooth_grad, gr.input_x_gradient, gr.expected_gradients, gr.integrated_gradients]
)
def test_every_method_can_be_trained_on(method: Any, chunk_size: int | None) -> None:
    model, x = net(), torch.randn(2, 3, dtype=torch.float64)
    more: Settings = {"std": 0.1, "n_samples": 3} if method is gr.smooth_grad else {}
    more |= {"baseline": 0.0, "n_steps": 40} if method is gr.integrated_gradients else {}
    more["chunk_size"] = chunk_size
    more |= (
        {"references": torch.zeros(2, 3, dtype=torch.float64), "n_samples": 3}
        if method is gr.expected_gradients
        else {}
    )
    a = method(model, x, gr.all_logits(), gr.Inputs(), per="feature", differentiable=True, **more)
    plain = method(model, x, gr.all_logits(), gr.Inputs(), per="feature", **more)
    assert torch.allclose(a.scores, plain.scores, atol=1e-14)
    assert not plain.scores.requires_grad
    loss = a.scores.square().sum()
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    weight, step = model[0].weight, 1e-6
    with torch.no_grad():
        weight[0, 0] += step
        up = method(model, x, gr.all_logits(), gr.Inputs(), per="feature", **more).scores.square().sum()
        weight[0, 0] -= 2 * step
        down = method(model, x, gr.all_logits(), gr.Inputs(), per="feature", **more).scores.square().sum()
        weight[0, 0] += step
    assert found[0][0, 0].item() == pytest.approx(((up - down) / (2 * step)).item(), rel=1e-5)


def test_saliency_per_feature_and_token() -> None:
    model, x = net(), torch.randn(4, 3, dtype=torch.float64)
    right = jacobian(model, x)
    a = gr.saliency(model, x, gr.all_logits(), gr.Inputs(), per="feature")
    assert torch.allclose(a.scores, right.abs(), atol=1e-14)
    assert a.change is None
    assert a.delta is None
    flat = nn.Sequential(nn.Flatten(), net(6))
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    right = jacobian(flat, x)
    for p in (1, 2, math.inf):
        a = gr.saliency(flat, x, gr.all_logits(), gr.Inputs(), norm=p)
        assert a.scores.shape == (4, 2, 2)
        assert torch.allclose(a.scores, torch.linalg.vector_norm(right, p, dim=-1), atol=1e-14)


def test_saliency_is_differentiable_where_a_gradient_is_zero() -> None:
    model = nn.Sequential(nn.Flatten(), net(6))
    with torch.no_grad():
        model[1][0].weight[:, :3] = 0
    a = gr.saliency(model, torch.randn(1, 2, 3, dtype=torch.float64), gr.logit(0), gr.Inputs(), differentiable=True)
    grads = torch.autograd.grad(a.scores.sum(), list(model.parameters()), allow_unused=True)
    assert all(bool(g.isfinite().all()) for g in grads if g is not None)


@pytest.mark.parametrize("method", [gr.saliency, gr.input_x_gradient])
def test_padded_tokens_score_zero_and_change_nothing(method: Any) -> None:
    model = bert(kind="BertForSequenceClassification")
    padded = tokens([3, 6], 8)
    a = method(model, padded, gr.all_logits(), gr.Embeddings())
    assert a.scores.shape == (2, 3, 8)
    for row, length in enumerate((3, 6)):
        alone = {name: value[row : row + 1, :length] for name, value in padded.items()}
        b = method(model, alone, gr.all_logits(), gr.Embeddings())
        assert torch.allclose(a.scores[row, :, :length], b.scores[0], atol=1e-14)
        assert bool((a.scores[row, :, length:] == 0).all())


@pytest.mark.parametrize("route", ["forward", "reverse"])
def test_input_x_gradient_of_all_targets(route: str) -> None:
    model, x = nn.Sequential(nn.Flatten(), net(6)), torch.randn(4, 2, 3, dtype=torch.float64)
    right = jacobian(model, x) * x[:, None]
    a = gr.input_x_gradient(model, x, gr.all_logits(), gr.Inputs(), route=route)
    assert torch.allclose(a.scores, right.sum(-1), atol=1e-14)
    b = gr.input_x_gradient(model, x, gr.all_logits(), gr.Inputs(), route=route, per="feature", chunk_size=2)
    assert torch.allclose(b.scores, right, atol=1e-14)


def test_smooth_grad_of_a_linear_function_is_its_weight() -> None:
    linear = nn.Linear(2, 1).double()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[2.0, -3.0]]))
    x = torch.randn(3, 2, dtype=torch.float64)
    a = gr.smooth_grad(linear, x, gr.logit(0), gr.Inputs(), std=9.0, per="feature", n_samples=5)
    assert torch.allclose(a.scores, torch.tensor([2.0, -3.0], dtype=torch.float64).expand(3, 2), atol=1e-14)


def test_smooth_grad_draws_from_its_generator_and_not_from_the_global_stream() -> None:
    model, x = net(), torch.randn(4, 3, dtype=torch.float64)
    before = torch.get_rng_state()

    def scores(seed: int | None, **more: Any) -> Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return gr.smooth_grad(
            model, x, gr.all_logits(), gr.Inputs(), std=0.5, per="feature", n_samples=7, generator=generator, **more
        ).scores

    assert torch.equal(scores(None), scores(None))
    assert torch.equal(scores(3), scores(3))
    assert not torch.equal(scores(3), scores(4))
    for size in (1, 3, 4, 9, 100):
        assert torch.allclose(scores(3), scores(3, chunk_size=size), atol=1e-14)
    assert torch.equal(torch.get_rng_state(), before)
    generator = torch.Generator().manual_seed(3)
    noise = [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(7)]
    right = torch.stack([jacobian(model, x + 0.5 * e) for e in noise]).mean(0)
    assert torch.allclose(scores(3), right, atol=1e-14)
    width = (x.amax(1) - x.amin(1))[:, None]
    right = torch.stack([jacobian(model, x + 0.5 * width * e) for e in noise]).mean(0)
    assert torch.allclose(scores(3, relative=True), right, atol=1e-14)


def test_expected_gradients_draw_references_and_estimate_their_error() -> None:
    model, x = net(), torch.randn(3, 3, dtype=torch.float64)
    background = torch.randn(5, 3, dtype=torch.float64)
    options: Settings = {"of": gr.all_logits(), "wrt": gr.Inputs(), "per": "feature"}
    a = gr.expected_gradients(model, x, references=background, n_samples=4000, **options)
    right = gr.integrated_gradients(model, x, baseline=list(background), n_steps=40, **options)
    assert a.error is not None
    assert bool(((a.scores - right.scores).abs().amax(-1) < 5 * a.error).all())
    assert bool((a.error < 0.1).all())
    assert a.delta is not None
    assert a.change is not None
    assert torch.allclose(a.scores.sum(-1), a.change + a.delta, atol=1e-12)
    for size in (1, 7, 64):
        b = gr.expected_gradients(model, x, references=background, n_samples=9, chunk_size=size, **options)
        c = gr.expected_gradients(model, x, references={"inputs": background}, n_samples=9, route="reverse", **options)
        assert torch.allclose(b.scores, c.scores, atol=1e-14)
        assert b.error is not None
        assert c.error is not None
        assert torch.allclose(b.error, c.error, atol=1e-7)


def test_expected_gradients_take_baselines_of_tokens() -> None:
    model, batch = bert(), tokens([4, 2])
    references = [gr.token_baseline(1), gr.mean_embedding()]
    a = gr.expected_gradients(model, batch, gr.all_logits(), gr.Embeddings(), references=references, n_samples=4)
    assert a.scores.shape == (2, 4, 3, 4)
    assert bool((a.scores[1, :, :, 2:] == 0).all())


@pytest.mark.parametrize(
    ("method", "options", "text"),
    [
        (gr.smooth_grad, {"std": -1.0}, "std"),
        (gr.smooth_grad, {"std": math.nan}, "std"),
        (gr.smooth_grad, {"std": 1.0, "n_samples": 0}, "sample"),
        (gr.saliency, {"norm": 3}, "norm"),
        (gr.saliency, {"per": "pixel"}, "per="),
        (gr.expected_gradients, {"references": torch.zeros(2, 4)}, "references"),
        (gr.expected_gradients, {"references": torch.zeros(0, 3)}, "references"),
        (gr.expected_gradients, {"references": {"x": torch.zeros(2, 3)}}, "inputs"),
        (gr.expected_gradients, {"references": torch.zeros(2, 3), "n_samples": 1}, "n_samples"),
        (gr.input_x_gradient, {"route": "no"}, "route="),
    ],
)
def test_what_does_not_fit_is_refused(method: Any, options: Settings, text: str) -> None:
    with pytest.raises(gr.GradregError, match=text):
        method(net(), torch.ones(2, 3, dtype=torch.float64), gr.logit(0), gr.Inputs(), **options)


@pytest.mark.parametrize("method", [gr.saliency, gr.input_x_gradient])
def test_every_layer_is_followed_through_the_later_ones(method: Any) -> None:
    """At the input itself nothing is put in place: each layer gets what it gets alone."""
    model, batch = bert(), tokens([4, 3])
    together = method(model, batch, gr.all_logits(), gr.Activations("bert.encoder.layer.*"))
    for layer in ("bert.encoder.layer.0", "bert.encoder.layer.1"):
        alone = method(model, batch, gr.all_logits(), gr.Activations(layer))
        assert torch.allclose(together.by_key[layer], alone.scores, atol=1e-14)
        assert bool(alone.scores.count_nonzero())


def test_what_is_as_many_as_tokens_is_not_taken_for_tokens() -> None:
    """Two heads beside two tokens, one of them padding; and a vector as wide as the text is long."""
    from tests.attribution.attribution_models import bert, tokens

    def first(outputs: Any, batch: gr.Batch) -> Tensor:
        return outputs.logits[:, 0] if outputs.logits.dim() == 3 else outputs.logits

    model, batch = bert(3), tokens([2, 1])
    wrt = gr.AttentionMaps(1)
    (right,) = gr.gradients(model, batch, first, wrt).values()
    found = gr.saliency(model, batch, first, wrt, per="feature")
    assert torch.equal(found.scores, right.abs())
    heads = gr.input_x_gradient(model, batch, first, wrt)
    assert bool(heads.scores[1, :, 1].any())
    assert not heads.valid
    assert not heads.ids
    model, batch = bert(3, kind="BertForSequenceClassification"), tokens([16, 4])
    pooled = gr.saliency(model, batch, first, gr.Activations("bert.pooler.dense"), per="feature")
    assert bool(pooled.scores[1].ne(0).all())
    assert not pooled.valid
