"""Integrated gradients: padding, chunks, baselines, refinement, warnings, routes, and what a call leaves alone."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradreg as gr
from gradreg.attribution import LogSpaced
from tests.attribution.attribution_models import Runner, bert, naive, tokens

WORDS: dict[str, Any] = {
    "of": gr.all_logits(),
    "wrt": gr.Embeddings(),
    "baseline": gr.token_baseline(1),
    "tolerance": 1e9,
}


def smooth_net(width: int = 3, classes: int = 2) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, classes)).double()


@pytest.mark.parametrize("route", ["forward", "reverse"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padded_rows_equal_unpadded_ones_and_pads_score_zero(route: str, left: bool) -> None:
    # BERT's classifier reads the first position, which is a pad on the left: there real tokens are classified
    model = bert(kind="BertForTokenClassification" if left else "BertForSequenceClassification")
    padded = tokens([3, 6], 8, left=left)
    a = gr.integrated_gradients(model, padded, n_steps=5, route=route, **WORDS)
    real = padded["attention_mask"].bool()
    for row, length in enumerate((3, 6)):
        alone = {name: value[row : row + 1, real[row]] for name, value in padded.items()}
        if left:  # learned positions: the padded row gets its own from the mask
            alone["position_ids"] = torch.arange(length).unsqueeze(0)
        b = gr.integrated_gradients(model, alone, n_steps=5, route=route, **WORDS)
        own = a.scores[row, real[row]] if left else a.scores[row]
        assert torch.allclose(own[..., real[row]], b.scores[0], atol=1e-14)
        assert bool((a.scores[row, ..., ~real[row]] == 0).all())
    assert torch.equal(next(iter(a.valid.values())), real)
    assert torch.equal(next(iter(a.ids.values())), padded["input_ids"])
    assert list(a.segments.values()) == ["source"]


@pytest.mark.parametrize("route", ["forward", "reverse"])
@pytest.mark.parametrize("per", ["token", "feature"])
def test_chunks_do_not_matter(route: str, per: str) -> None:
    model, batch = bert(), tokens([4, 2])
    options = {"n_steps": 3, "route": route, "per": per, **WORDS}
    whole = gr.integrated_gradients(model, batch, **options)
    for size in (1, 2, 4, 7, 100):
        if per == "feature" and route == "forward" and size < 7:
            continue
        part = gr.integrated_gradients(model, batch, chunk_size=size, **options)
        assert torch.allclose(part.scores, whole.scores, atol=1e-14)
        assert part.change is not None
        assert whole.change is not None
        assert torch.allclose(part.change, whole.change, atol=1e-14)


def test_order_and_repetition_of_examples_do_not_matter() -> None:
    model, batch = bert(), tokens([4, 2, 3])
    whole = gr.integrated_gradients(model, batch, n_steps=4, **WORDS)
    order = [2, 0, 0, 1]
    other = gr.integrated_gradients(model, {name: value[order] for name, value in batch.items()}, n_steps=4, **WORDS)
    assert torch.allclose(other.scores, whole.scores[order], atol=1e-14)


@settings(max_examples=12, deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    n=st.integers(1, 3),
    targets=st.lists(st.integers(1, 3), max_size=2),
    per=st.sampled_from(["token", "feature"]),
    route=st.sampled_from(["forward", "reverse"]),
    chunk=st.one_of(st.none(), st.integers(1, 5)),
)
def test_shapes(shape: list[int], n: int, targets: list[int], per: str, route: str, chunk: int | None) -> None:
    torch.manual_seed(0)
    count = int(torch.Size(shape).numel())
    weight = torch.randn(count, int(torch.Size(targets).numel()), dtype=torch.float64)

    def of(outputs: Tensor, batch: gr.Batch) -> Tensor:
        return (outputs.flatten(1).tanh() @ weight).reshape(len(outputs), *targets)

    x = torch.randn(n, *shape, dtype=torch.float64)
    a = gr.integrated_gradients(
        nn.Identity(), x, of, gr.Inputs(), baseline=0.3, n_steps=20, per=per, route=route, chunk_size=chunk
    )
    assert a.scores.shape == (n, *targets, *(shape if per == "feature" else shape[:1]))
    assert a.delta is not None
    assert a.error is not None
    assert a.delta.shape == a.error.shape == (n, *targets)
    assert a.delta.abs().max() < 1e-6


def test_a_baseline_is_required() -> None:
    with pytest.raises(gr.GradregError, match="token_baseline"):
        gr.integrated_gradients(smooth_net(), torch.ones(2, 3, dtype=torch.float64), gr.logit(0), gr.Inputs())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"baseline": torch.zeros(4)}, "broadcasts"),
        ({"baseline": "pad"}, "token_baseline"),
        ({"baseline": []}, "empty"),
        ({"baseline": {"input": torch.zeros(3)}}, "'inputs'"),
        ({"baseline": torch.zeros(3, dtype=torch.long)}, "int64"),
        ({"baseline": gr.mean_embedding()}, "mean_embedding"),
        ({"baseline": gr.token_baseline(0)}, "token ids"),
        ({"baseline": 0.0, "n_steps": 0}, "n_steps"),
        ({"baseline": 0.0, "n_steps": "many"}, "n_steps"),
        ({"baseline": 0.0, "tolerance": 0}, "tolerance"),
        ({"baseline": 0.0, "per": "word"}, "per="),
        ({"baseline": 0.0, "rule": "trapezoid"}, "rule="),
        ({"baseline": 0.0, "route": "sideways"}, "route="),
        ({"baseline": 0.0, "chunk_size": 0}, "chunk_size"),
        ({"baseline": 0.0, "route": "forward", "differentiable": True}, "reverse"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(gr.GradregError, match=text):
        gr.integrated_gradients(
            smooth_net(), torch.ones(2, 3, dtype=torch.float64), gr.logit(0), gr.Inputs(), **options
        )


def test_integer_inputs_name_the_embedding_route() -> None:
    with pytest.raises(gr.GradregError, match=r"Embeddings\(\)"):
        gr.integrated_gradients(bert(), tokens([3]), gr.all_logits(), gr.Inputs("input_ids"), baseline=0.0)


def test_baselines_of_tokens_means_tensors_and_several() -> None:
    model, batch = bert(), tokens([4, 3])
    key, table = "bert.embeddings.word_embeddings", model.bert.embeddings.word_embeddings.weight.detach()
    options = {**WORDS, "n_steps": 4}

    def scores(baseline: Any) -> Tensor:
        return gr.integrated_gradients(model, batch, **{**options, "baseline": baseline}).scores

    assert torch.allclose(scores(gr.token_baseline(7)), scores(table[7]), atol=1e-14)
    assert torch.allclose(scores(gr.mean_embedding()), scores({key: table.mean(0)}), atol=1e-13)
    assert torch.allclose(scores(0.5), scores(torch.full((4, 16), 0.5)), atol=1e-14)
    both = scores([gr.token_baseline(7), 0.5])
    assert torch.allclose(both, (scores(table[7]) + scores(0.5)) / 2, atol=1e-13)
    kept = [int(batch["input_ids"][0, 0])]
    with_kept = scores(gr.token_baseline(7, keep=kept))
    assert bool((with_kept[0, :, :, 0] == 0).all())


@pytest.mark.parametrize("bad", [-1, 1.5, True])
def test_token_ids_are_checked(bad: Any) -> None:
    with pytest.raises(gr.GradregError, match="token id"):
        gr.token_baseline(bad)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-6, 1e-10])
def test_automatic_steps_meet_the_tolerance_and_the_estimate_covers_the_error(tolerance: float) -> None:
    net, x = smooth_net(), 3 * torch.randn(4, 3, dtype=torch.float64)
    options = {"baseline": 0.0, "per": "feature"}
    a = gr.integrated_gradients(net, x, gr.all_logits(), gr.Inputs(), n_steps="auto", tolerance=tolerance, **options)
    right = gr.integrated_gradients(net, x, gr.all_logits(), gr.Inputs(), n_steps=400, **options)
    assert a.error is not None
    true = (a.scores - right.scores).abs().amax(-1)
    assert bool((true <= a.error + 1e-14).all())
    assert bool((a.error <= tolerance * a.scores.abs().sum(-1)).all())
    assert a.provenance["steps"] in (15, 31, 63, 127)


class NormalizedInput(nn.Module):
    """LayerNorm on the raw input: at a zero baseline the integrand is a spike."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.head = nn.LayerNorm(32, eps=eps).double(), nn.Linear(32, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).tanh())[:, 0]


def test_a_zero_vector_before_a_normalization_is_named_and_remedied() -> None:
    torch.manual_seed(0)
    net, x = NormalizedInput(1e-12), torch.randn(2, 32, dtype=torch.float64)
    options: dict[str, Any] = {"of": gr.all_logits(), "wrt": gr.Inputs(), "per": "feature"}
    with pytest.warns(gr.errors.AttributionWarning, match=r"vectors of zeros.*mean_embedding\(\).*rule='log'"):
        plain = gr.integrated_gradients(net, x, baseline=0.0, n_steps=64, **options)
    assert plain.delta is not None
    assert plain.change is not None
    assert bool((plain.delta.abs() > 0.9 * plain.change.abs()).all())
    a = gr.integrated_gradients(net, x, baseline=0.0, n_steps=32, rule="log", **options)
    assert a.delta is not None
    assert a.change is not None
    assert bool((a.delta.abs() < 1e-4 * a.change.abs()).all())
    b = gr.integrated_gradients(net, x, baseline=0.0, n_steps="auto", tolerance=1e-6, rule=LogSpaced(1e-8), **options)
    assert b.delta is not None
    assert bool((b.delta.abs() < 1e-6 * a.change.abs()).all())


def test_encoder_and_decoder_move_together() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    source = {**tokens([5, 3]), "labels": torch.randint(3, 30, (2, 4))}
    source["input_ids"] = source["input_ids"].clamp(max=29)
    found = {}
    for route in ("forward", "reverse"):
        a = gr.integrated_gradients(
            model,
            source,
            gr.logit(3),
            gr.Embeddings(),
            baseline=gr.mean_embedding(),
            n_steps=40,
            route=route,
            tolerance=1,
        )
        encoder, decoder = a.by_key
        assert (a.segments[encoder], a.segments[decoder]) == ("source", "target prefix")
        assert a.by_key[encoder].shape == (2, 4, 5)
        assert a.by_key[decoder].shape == (2, 4, 4)
        assert a.scores.shape == (2, 4, 9)
        assert a.target_axes == ("token",)
        assert a.delta is not None
        assert a.change is not None
        assert torch.allclose(a.scores.sum(-1), a.change + a.delta, atol=1e-6)
        assert bool((a.by_key[encoder][1, :, 3:] == 0).all())
        # causal: a target does not depend on later positions of the prefix
        assert bool((a.by_key[decoder][:, 0, 1:].abs() < 1e-12).all())
        found[route] = a.scores
    assert torch.allclose(found["forward"], found["reverse"], atol=1e-6)
    by_tokens = gr.integrated_gradients(
        model, source, gr.logit(3), gr.Embeddings(), baseline=gr.token_baseline(2, keep=(0,)), n_steps=4, tolerance=1e9
    )
    assert by_tokens.scores.shape == (2, 4, 9)


def test_differentiable_scores_carry_gradient_to_every_parameter() -> None:
    """Scores as a loss: the second derivatives equal those of a graph written by hand."""
    model, batch = bert(layers=1), tokens([4])
    embedding = model.bert.embeddings.word_embeddings
    a = gr.integrated_gradients(model, batch, n_steps=3, differentiable=True, **WORDS)
    loss = a.scores.square().sum()
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)

    model.set_attn_implementation("eager")
    value, base = embedding(batch["input_ids"]), embedding(torch.ones_like(batch["input_ids"]))
    run, total = Runner(model, embedding, batch), torch.zeros((), dtype=torch.float64)
    nodes = torch.tensor([0.5 - 0.15**0.5, 0.5, 0.5 + 0.15**0.5], dtype=torch.float64)  # Gauss-Legendre with 3 nodes
    weights = torch.tensor([5, 8, 5], dtype=torch.float64) / 18
    for token in range(4):
        for label in range(3):
            score = torch.zeros(4, dtype=torch.float64)
            for alpha, weight in zip(nodes, weights, strict=True):
                at = base + alpha * (value - base)
                with sdpa_kernel(SDPBackend.MATH):  # for versions whose models do not change their attention
                    output = run(at)[0, token, label]
                (gradient,) = torch.autograd.grad(output, at, create_graph=True)
                score = score + weight * (gradient * (value - base)).sum(-1)[0]
            total = total + score.square().sum()
    right = torch.autograd.grad(total, parameters, allow_unused=True)
    assert torch.allclose(loss.detach(), total.detach(), rtol=1e-12)
    for name, one, two in zip(names, found, right, strict=True):
        one, two = (torch.zeros(1) if g is None else g for g in (one, two))
        assert torch.allclose(one, two, rtol=1e-8, atol=1e-10 * total.item()), name
    assert sum(bool(g is not None and g.count_nonzero()) for g in found) > 10


class Counting(nn.Module):
    """Counts the rows of its forwards."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.calls = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, classes)).double(), []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return self.net(x)


def test_the_work_does_not_depend_on_the_number_of_classes() -> None:
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    rows = []
    for classes in (9, 90):
        counting = Counting(classes)
        counts: list[int] = counting.calls
        a = gr.integrated_gradients(counting, x, gr.all_logits(), gr.Inputs(), baseline=0.0, n_steps=7)
        assert a.scores.shape == (2, 5, classes, 5)
        assert a.provenance["plan"].startswith("forward mode: 5 tangents")
        rows.append(list(counts))
    assert rows[0] == rows[1]


def test_padded_tokens_cost_no_tangent() -> None:
    a = gr.integrated_gradients(bert(), tokens([3, 2], 9), n_steps=2, **WORDS)
    assert a.provenance["plan"].startswith("forward mode: 3 tangents")


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


class Refusing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Refused.apply(x).repeat(1, 5)


def test_models_without_forward_mode_take_reverse_mode_and_say_why() -> None:
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    options: dict[str, Any] = {
        "of": gr.all_logits(),
        "wrt": gr.Inputs(),
        "baseline": 0.0,
        "per": "feature",
        "n_steps": 2,
    }
    a = gr.integrated_gradients(Refusing(), x, **options)
    assert torch.allclose(a.scores[0, :2], torch.diag(x[0].square()), atol=1e-14)
    assert a.provenance["plan"].startswith("reverse mode")
    assert "forward mode" in a.provenance["plan"]
    with pytest.raises(gr.errors.RouteError, match="forward"):
        gr.integrated_gradients(Refusing(), x, route="forward", **options)


@pytest.mark.parametrize("show", [True, False, None])
def test_long_work_is_announced_on_request(show: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    gr.integrated_gradients(bert(), tokens([3]), n_steps=2, show_progress=show, **WORDS)
    told = capsys.readouterr()
    assert told.out == ""
    assert ("forward mode: 3 tangents" in told.err and " s\n" in told.err) is (show is True)
    assert bool(told.err) is (show is True)


@pytest.mark.filterwarnings("ignore::gradreg.errors.AttributionWarning")
@pytest.mark.parametrize("breaks", [False, True])
def test_a_call_in_the_middle_of_a_training_step_leaves_no_trace(breaks: bool) -> None:
    model, batch = bert().train(), tokens([4, 2])
    parameters = dict(model.named_parameters())
    next(iter(parameters.values())).requires_grad_(False)
    loss = model(**batch).logits.square().sum()
    loss.backward()
    before = {
        "grad": {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()},
        "value": {name: p.detach().clone() for name, p in parameters.items()},
        "flags": {name: p.requires_grad for name, p in parameters.items()},
        "modes": [module.training for module in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
        "config": model.config.to_dict(),
        "random": torch.get_rng_state(),
        "enabled": torch.is_grad_enabled(),
    }

    def broken(outputs: Any, batch: gr.Batch) -> Tensor:
        if len(batch) != 2:
            raise RuntimeError("broken on purpose")
        return outputs.logits[:, :, 0]

    if breaks:
        with pytest.raises(Exception, match=r"broken on purpose|first examples"):
            gr.integrated_gradients(model, batch, n_steps=2, **{**WORDS, "of": broken})
    else:
        gr.integrated_gradients(model, batch, n_steps=2, **WORDS)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert isinstance(parameter, nn.Parameter)
        grad = before["grad"][name]
        assert (parameter.grad is None) if grad is None else torch.equal(parameter.grad, grad)
        assert torch.equal(parameter, before["value"][name])
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before["flags"]
    assert [module.training for module in model.modules()] == before["modes"]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    assert hooks == before["hooks"]
    assert model.config.to_dict() == before["config"]
    assert torch.equal(torch.get_rng_state(), before["random"])
    assert torch.is_grad_enabled() is before["enabled"]


def test_a_hundred_calls_leave_no_tensor_behind() -> None:
    net, x = smooth_net(), torch.randn(2, 3, dtype=torch.float64)

    def call() -> None:
        gr.integrated_gradients(net, x, gr.all_logits(), gr.Inputs(), baseline=0.0, n_steps=4, per="feature")

    def living() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    for _ in range(3):
        call()
    before = living()
    for _ in range(100):
        call()
    assert living() == before


def test_naive_loop_of_a_scalar_with_targets_from_the_batch() -> None:
    """Losses read the labels of the repeated rows."""
    net, x = smooth_net(), torch.randn(3, 3, dtype=torch.float64)
    labels = torch.tensor([0, 1, 1])
    a = gr.integrated_gradients(
        net, (x, labels), gr.loss(nn.functional.cross_entropy), gr.Inputs(), baseline=0.0, n_steps=5, per="feature"
    )
    for row in range(3):
        right = naive(
            net,
            x[row : row + 1],
            torch.zeros(1, 3, dtype=torch.float64),
            5,
            lambda z, y=labels[row]: nn.functional.cross_entropy(z, y[None]),
        )
        assert torch.allclose(a.scores[row], right[0], atol=1e-14)


def test_points_that_lead_only_to_other_points_are_named() -> None:
    model, batch = bert(), tokens([4])
    wrt = gr.Activations("bert.encoder.layer.*")
    with pytest.warns(gr.errors.AttributionWarning, match=r"'bert.encoder.layer.0' are zero"):
        gr.integrated_gradients(model, batch, gr.logit(0), wrt, baseline=0.1, n_steps=3, tolerance=1e9)


def test_train_mode_with_dropout_is_warned_of() -> None:
    model = bert().train()
    with pytest.warns(gr.errors.AttributionWarning) as warned:
        gr.integrated_gradients(model, tokens([4]), n_steps=3, **{**WORDS, "tolerance": 1e-9})
    # torch loads its forward mode at the first use in a process, with warnings of its own
    texts = [str(one.message) for one in warned if issubclass(one.category, gr.errors.GradregWarning)]
    assert len(texts) == 2
    assert all("model.eval()" in text for text in texts)  # no guess at the baseline


def test_inference_mode_around_a_call() -> None:
    net, x = smooth_net(), torch.randn(2, 3, dtype=torch.float64)
    options: dict[str, Any] = {"of": gr.all_logits(), "wrt": gr.Inputs(), "baseline": 0.0, "per": "feature"}
    right = gr.integrated_gradients(net, x, **options)
    for route in ("forward", "reverse"):
        with torch.inference_mode():
            found = gr.integrated_gradients(net, x, route=route, **options)
        assert torch.allclose(found.scores, right.scores, atol=1e-14)


def test_what_made_a_result_is_written_down() -> None:
    a = gr.integrated_gradients(bert(), tokens([4]), n_steps=3, **WORDS)
    assert a.method == "integrated_gradients"
    assert {**a.provenance, "plan": "", "torch": "", "transformers": "", "gradreg": ""} == {
        "gradreg": "",
        "torch": "",
        "transformers": "",
        "model": "BertForTokenClassification",
        "dtype": "float64",
        "device": "cpu",
        "attention": "sdpa, math kernel",
        "of": "AllLogits(output=None)",
        "wrt": "Embeddings(glob=None)",
        "differentiable": False,
        "baseline": "TokenBaseline(id=1, keep=())",
        "rule": "GaussLegendre()",
        "steps": 3,
        "plan": "",
    }


@pytest.mark.parametrize("route", ["forward", "reverse"])
def test_the_chunk_bounds_the_rows_of_every_forward(route: str) -> None:
    counting = Counting(3)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    gr.integrated_gradients(
        counting, x, gr.all_logits(), gr.Inputs(), baseline=0.0, n_steps=40, route=route, chunk_size=30
    )
    widest = max(counting.calls)
    assert widest == (6 if route == "forward" else 2)  # 30 over 5 tangents, or over 15 targets
    assert sum(rows == widest for rows in counting.calls) >= 80 // widest


def test_mixed_examples_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Softmax(0)).double()
    with pytest.raises(gr.errors.CoupledExamplesError):
        gr.integrated_gradients(
            model,
            torch.randn(2, 3, dtype=torch.float64),
            gr.all_logits(),
            gr.Inputs(),
            baseline=0.0,
            per="feature",
            n_steps=3,
        )


class Scaled(nn.Embedding):
    """An embedding that scales what it looks up, as those of BART and Gemma do."""

    def forward(self, input: Tensor) -> Tensor:
        return 3 * super().forward(input)


def test_the_mean_embedding_is_that_of_what_the_module_returns() -> None:
    net = nn.Sequential(Scaled(9, 3), nn.Flatten(), nn.Linear(12, 2)).double()
    ids = torch.tensor([[1, 5, 0, 8]])
    found = gr.integrated_gradients(net, ids, gr.all_logits(), gr.Embeddings(), baseline=gr.mean_embedding(), n_steps=1)
    moved = 3 * (net[0].weight[ids[0]] - net[0].weight.mean(0))
    right = (net[2].weight.reshape(2, 4, 3) * moved).sum(-1)
    assert torch.allclose(found.scores[0], right, atol=1e-12)


@pytest.mark.parametrize(("shape", "per"), [((2, 5), "token"), ((2, 5, 3), "token"), ((2, 1, 4, 4), "feature")])
def test_units_go_by_the_shape(shape: tuple[int, ...], per: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.LazyLinear(3)).double()
    x = torch.randn(*shape, dtype=torch.float64)
    net(x)
    for a in (
        gr.integrated_gradients(net, x, gr.all_logits(), gr.Inputs(), baseline=0.0),
        gr.saliency(net, x, gr.all_logits(), gr.Inputs()),
        gr.input_x_gradient(net, x, gr.all_logits(), gr.Inputs()),
        gr.smooth_grad(net, x, gr.all_logits(), gr.Inputs(), std=0.1, n_samples=2),
        gr.expected_gradients(net, x, gr.all_logits(), gr.Inputs(), references=x, n_samples=2),
    ):
        assert a.per == per
        assert a.scores.shape == (2, 3, *(shape[1:2] if per == "token" else shape[1:]))


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ({0: "PER", 1: "LOC", 2: "O"}, {"class": ["PER", "LOC", "O"]}),
        ({"0": "PER", "1": "LOC", "2": "O"}, {"class": ["PER", "LOC", "O"]}),  # as JSON has keys
        ({0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, {}),  # what transformers says when nobody named them
        ({0: "a", 1: "b"}, {}),
    ],
)
def test_classes_have_the_names_of_the_configuration(names: dict[Any, str], found: dict[str, list[str]]) -> None:
    net = smooth_net(classes=3)
    net.config = SimpleNamespace(id2label=names)  # type: ignore[assignment]  # any object with names
    x = torch.randn(2, 3, dtype=torch.float64)
    assert dict(gr.saliency(net, x, gr.all_logits(), gr.Inputs()).target_labels) == found
    assert dict(gr.saliency(net, x, gr.top_logit(), gr.Inputs()).target_labels) == {}
