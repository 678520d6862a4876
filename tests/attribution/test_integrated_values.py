"""Integrated gradients: right values of known functions, and the naive loop on transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from tests.attribution.attribution_models import Runner, bert, naive, tokens

FEATURE = {"wrt": gr.Inputs(), "per": "feature"}


class Function(nn.Module):
    """A function of the inputs as a module without parameters."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def attributed(function, point, **options) -> gr.Attribution:
    x = torch.tensor([point], dtype=torch.float64)
    options = {"of": gr.all_logits(), **FEATURE, **options}
    return gr.integrated_gradients(Function(function), x, options.pop("of"), options.pop("wrt"), **options)


def linear(x: Tensor) -> Tensor:
    return 2 * x[:, 0] - 3 * x[:, 1] + 7


@pytest.mark.parametrize("route", ["forward", "reverse"])
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_linear(route: str, steps: int) -> None:
    a = attributed(linear, [3.0, 4.0], baseline=0.0, n_steps=steps, route=route)
    assert torch.allclose(a.scores, torch.tensor([[6.0, -12.0]], dtype=torch.float64), atol=1e-14)
    assert a.change is not None
    assert a.change.item() == pytest.approx(-6)


@pytest.mark.parametrize(("baseline", "right"), [(0.0, [6.0, 6.0]), (1.0, [5.0, 6.0])])
def test_product(baseline: float, right: list[float]) -> None:
    a = attributed(lambda x: x[:, 0] * x[:, 1], [3.0, 4.0], baseline=baseline, n_steps=1)
    assert torch.allclose(a.scores, torch.tensor([right], dtype=torch.float64), atol=1e-14)


def saturated(x: Tensor) -> Tensor:
    return 1 - (1 - x[:, 0]).relu()


def test_saturation() -> None:
    a = attributed(saturated, [2.0], baseline=0.0, n_steps=50)
    assert a.scores.item() == pytest.approx(1, abs=1e-14)
    assert a.delta is not None
    assert abs(a.delta.item()) < 1e-14


def test_saturation_with_a_node_on_the_kink_is_reported() -> None:
    with pytest.warns(gr.errors.AttributionWarning, match="kinks"):
        a = attributed(saturated, [2.0], baseline=0.0, n_steps=51)
    assert a.scores.item() == pytest.approx(0.9695, abs=5e-5)
    assert a.delta is not None
    assert a.error is not None
    assert a.delta.item() == pytest.approx(a.scores.item() - 1, abs=1e-14)
    assert a.error.item() >= abs(a.delta.item())


def test_maximum() -> None:
    a = attributed(lambda x: x.amax(1), [3.0, 4.0], baseline=0.0)
    assert torch.allclose(a.scores, torch.tensor([[0.0, 4.0]], dtype=torch.float64), atol=1e-14)


def test_class_scores_of_a_softmax_sum_to_zero() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(5, 4), nn.Softmax(-1)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    a = gr.integrated_gradients(net, x, gr.all_logits(), baseline=0.0, n_steps=50, **FEATURE)
    assert a.scores.shape == (6, 4, 5)
    assert a.scores.sum(1).abs().max() < 1e-15
    assert a.delta is not None
    assert a.delta.abs().max() < 1e-14


@pytest.mark.parametrize("rule", ["gauss_legendre"])
@pytest.mark.filterwarnings("ignore::gradreg.errors.AttributionWarning")
def test_exchange_of_input_and_baseline(rule: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, b = torch.randn(2, 4, 3, dtype=torch.float64)
    options = {"n_steps": 7, "rule": rule, **FEATURE}
    there = gr.integrated_gradients(net, x, gr.all_logits(), baseline=b, **options)
    back = gr.integrated_gradients(net, b, gr.all_logits(), baseline=x, **options)
    assert torch.allclose(there.scores, -back.scores, atol=1e-14)


@pytest.mark.parametrize("route", ["forward", "reverse"])
def test_all_targets_of_a_token_classifier_equal_the_naive_loop(route: str) -> None:
    model, batch = bert(), tokens([5, 3])
    a = gr.integrated_gradients(
        model,
        batch,
        gr.all_logits(),
        gr.Embeddings(),
        baseline=gr.token_baseline(0),
        n_steps=6,
        route=route,
        tolerance=1e9,
    )
    assert a.scores.shape == (2, 5, 3, 5)
    assert a.target_axes == ("token", "class")
    embedding = model.bert.embeddings.word_embeddings
    for row in range(2):
        one = {name: value[row : row + 1] for name, value in batch.items()}
        value = embedding(one["input_ids"]).detach()
        base = torch.where(one["attention_mask"].bool()[..., None], embedding.weight[0].detach(), value)
        run = Runner(model, embedding, one)
        for token in range(5):
            for label in range(3):
                right = naive(run, value, base, 6, lambda z, t=token, c=label: z[0, t, c]).sum(-1)[0]
                assert torch.allclose(a.scores[row, token, label], right, atol=1e-12)
        change = (run(value) - run(base))[0].detach()
        assert a.change is not None
        assert a.delta is not None
        assert torch.allclose(a.change[row], change, atol=1e-12)
        assert torch.allclose(a.delta[row], a.scores[row].sum(-1) - change, atol=1e-12)


@pytest.mark.parametrize("per", ["token", "feature"])
@pytest.mark.parametrize(
    "wrt",
    [gr.Embeddings(), gr.Activations("bert.encoder.layer.0"), gr.AttentionMaps(0)],
    ids=["words", "hidden", "maps"],
)
@pytest.mark.filterwarnings("ignore::gradreg.errors.AttributionWarning")
def test_both_routes_agree_and_features_sum_to_tokens(wrt, per: str) -> None:
    model, batch = bert(), tokens([4, 3])
    options = {"baseline": 0.1, "n_steps": 3, "per": per}
    one, two = (
        gr.integrated_gradients(model, batch, gr.all_logits(), wrt, route=route, **options)
        for route in ("forward", "reverse")
    )
    assert torch.allclose(one.scores, two.scores, atol=1e-12)
    assert one.delta is not None
    assert two.delta is not None
    assert torch.allclose(one.delta, two.delta, atol=1e-12)
    (value,) = two.by_key.values()
    whole = value.flatten(3).sum(-1)
    assert one.change is not None
    assert torch.allclose(whole, one.change + one.delta, atol=1e-12)


def test_logits_without_a_named_target_give_all_of_them() -> None:
    a = gr.integrated_gradients(
        bert(), tokens([4]), gr.all_logits(), gr.Embeddings(), baseline=gr.mean_embedding(), n_steps=2, tolerance=1e9
    )
    assert a.scores.shape == (1, 4, 3, 4)
    assert a.delta is not None
    assert a.delta.shape == (1, 4, 3)


def test_low_precision_and_no_grad_surroundings() -> None:
    net = nn.Linear(3, 2).to(torch.bfloat16)
    with torch.no_grad():
        a = gr.integrated_gradients(
            net, torch.ones(2, 3, dtype=torch.bfloat16), gr.all_logits(), baseline=0.0, **FEATURE
        )
    assert a.scores.dtype == torch.float32
    assert torch.allclose(a.scores[0], net.weight.float(), rtol=0.02)


def test_heads_keep_their_axis() -> None:
    model = gr.SharedBase(nn.Linear(3, 4), [nn.Sequential(nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)]).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    for wrt in (gr.Inputs(), gr.Features()):
        for route in ("forward", "reverse"):
            a = gr.integrated_gradients(
                model, x, gr.all_logits(), wrt, baseline=0.0, n_steps=20, per="feature", route=route
            )
            width = 3 if isinstance(wrt, gr.Inputs) else 4
            assert a.scores.shape == (5, 3, 2, width)
            assert a.target_axes == ("head", "class")
            assert a.delta is not None
            assert a.delta.abs().max() < 1e-10


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_causal_language_models(family: str, left: bool) -> None:
    """Fused projections (GPT-2) and rotary positions with float32 inside (Llama); later tokens have no influence."""
    import transformers

    torch.manual_seed(0)
    if family == "GPT2":
        config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config)
    model = model.double().eval()
    batch = tokens([5, 3], left=left)
    options = {"baseline": gr.mean_embedding(), "n_steps": 16, "tolerance": 1}
    one, two = (
        gr.integrated_gradients(model, batch, gr.logit(7), gr.Embeddings(), route=route, **options)
        for route in ("forward", "reverse")
    )
    assert one.scores.shape == (2, 5, 5)
    assert torch.allclose(one.scores, two.scores, atol=1e-6)
    real = batch["attention_mask"].bool()
    for row in range(2):
        own = one.scores[row][real[row]][:, real[row]]
        assert bool((own.triu(1).abs() < 1e-9).all())
        assert bool((one.scores[row][:, ~real[row]] == 0).all())
    assert one.delta is not None
    assert bool((one.delta[real].abs() < 1e-3 * one.scores.abs().sum(-1)[real] + 1e-6).all())
