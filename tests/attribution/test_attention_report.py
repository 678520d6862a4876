"""The attention report: its formulas on eager autograd gradients, padding, order, graphs, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradreg as gr
from gradreg.attribution.attention._statistics import PER_QUERY, QUANTITIES, sums
from gradreg.experiments.transformers.families import FAMILIES

pytest.importorskip("transformers")

FAMILY = {family.name: family for family in FAMILIES}
TOKENS = gr.loss(F.cross_entropy)


def token_batch(family, n=3, padded=True):
    batch = family.batch(n, padded=padded)
    labels = torch.randint(3, batch.inputs["input_ids"].shape, generator=torch.Generator().manual_seed(3))
    return gr.Batch(batch.inputs, labels.masked_fill(batch.inputs["attention_mask"] == 0, -100))


def kinds_of(ids):
    """Three kinds that share all keys: the first token, those with even ids, all others."""
    first = torch.zeros_like(ids, dtype=torch.bool)
    first[:, 0] = True
    even = (ids % 2 == 0) & ~first
    return {"first": first, "even": even, "rest": ~first & ~even}


def plainly(weights, gradient, kind, queries, keys):
    """One number per quantity for one head, in loops over examples, queries and keys."""
    rows, pairs = 0, 0
    found = dict.fromkeys(QUANTITIES, 0.0)
    n, length, width = weights.shape
    for i, q in itertools.product(range(n), range(length)):
        seen = [k for k in range(width) if keys[i, k] and weights[i, q, k] > 0]
        if not queries[i, q] or not seen:
            continue
        rows += 1
        average = sum(weights[i, q, k] * gradient[i, q, k] for k in seen)
        for k in seen:
            if not kind[i, k]:
                continue
            a, g = weights[i, q, k], gradient[i, q, k]
            pairs += 1
            found["attention"] = found["attention"] + a
            found["gradient"] = found["gradient"] + g.abs()
            found["signed_gradient"] = found["signed_gradient"] + g
            found["centered_gradient"] = found["centered_gradient"] + (g - average).abs()
            found["score_gradient"] = found["score_gradient"] + (a * (g - average)).abs()
            found["weighted_gradient"] = found["weighted_gradient"] + a * g
            found["joint_score_gradient"] = found["joint_score_gradient"] + a * (g - average)
    return {name: value / (rows if name in PER_QUERY else pairs) for name, value in found.items()}


def eager_maps(model, batch, of, names=("attentions",), create_graph=False):
    """Attention weights, and gradients of the summed scalars, from a model that writes its attention out."""
    outputs = model(**batch.inputs, output_attentions=True)
    maps = [one for name in names for one in outputs[name]]
    values = of(outputs, batch).flatten(1).T if of(outputs, batch).dim() > 1 else of(outputs, batch)[None]
    return maps, [torch.autograd.grad(one.sum(), maps, retain_graph=True, create_graph=create_graph) for one in values]


def compare(side, maps, gradients, kinds, queries, keys, tolerance=1e-10):
    for layer, (weights, gradient) in enumerate(zip(maps, gradients, strict=True)):
        for head, kind in itertools.product(range(weights.shape[1]), side.kinds):
            expected = plainly(weights[:, head], gradient[:, head], kinds[kind], queries, keys)
            for quantity, value in expected.items():
                got = side.get(quantity, kind)[layer, head]
                close = {"atol": tolerance, "rtol": tolerance, "check_dtype": False}  # T5 of 4.57 has maps in float32
                torch.testing.assert_close(got, value.detach(), msg=f"{quantity} {kind}", **close)


@pytest.mark.parametrize("name", ["BERT, token classifier"])
def test_quantities_are_their_formulas_on_eager_gradients(name):
    family = FAMILY[name]
    batch = token_batch(family)
    report = gr.attention_report(family.make(), batch, TOKENS, kinds=kinds_of)
    maps, (gradients,) = eager_maps(family.make("eager"), batch, TOKENS)
    mask = batch.inputs["attention_mask"].bool()
    assert list(report.sides) == ["self"]
    assert report.sides["self"].layers == (0, 1)
    compare(report.sides["self"], maps, gradients, kinds_of(batch.inputs["input_ids"]), mask, mask)


def test_several_targets_each_have_their_own_statistics():
    family = FAMILY["BERT, classifier"]
    batch = family.batch()
    report = gr.attention_report(family.make(), batch, gr.all_logits(), kinds=kinds_of)
    assert report.targets == (3,)
    assert report.table["self"]["gradient"].shape == (2, 2, 3, 3)
    assert report.table["self"]["attention"].shape == (2, 2, 3)
    maps, gradients = eager_maps(family.make("eager"), batch, gr.all_logits())
    mask = batch.inputs["attention_mask"].bool()
    for target in range(3):
        own = report.target(target)
        compare(own.sides["self"], maps, gradients[target], kinds_of(batch.inputs["input_ids"]), mask, mask)


@pytest.mark.parametrize(("name", "tolerance"), [("BART", 1e-10), ("T5", 1e-5)])
def test_encoder_decoder_and_cross_maps(name, tolerance):
    family = FAMILY[name]
    batch = family.batch()
    labels = torch.randint(3, (3, 4))
    labels[1, 2:] = -100  # without a decoder mask, targets end before these
    batch = gr.Batch(batch.inputs, labels)
    report = gr.attention_report(family.make(), batch, TOKENS, kinds=kinds_of)
    ids, decoder_ids = batch.inputs["input_ids"], batch.inputs["decoder_input_ids"]
    mask, target_mask = batch.inputs["attention_mask"].bool(), torch.ones(3, 4, dtype=torch.bool)
    target_mask[1, 2:] = False
    where = {
        "encoder": ("encoder_attentions", ids, mask, mask),
        "decoder": ("decoder_attentions", decoder_ids, target_mask, target_mask),
        "cross": ("cross_attentions", ids, target_mask, mask),
    }
    assert list(report.sides) == list(where)
    names = [attribute for attribute, *_ in where.values()]
    maps, (gradients,) = eager_maps(family.make("eager"), batch, TOKENS, names)
    for place, (side, (_, key_ids, queries, keys)) in enumerate(where.items()):
        part = slice(2 * place, 2 * place + 2)
        compare(report.sides[side], maps[part], gradients[part], kinds_of(key_ids), queries, keys, tolerance)


@pytest.mark.parametrize(
    ("name", "left", "tolerance"),
    [
        ("BERT, token classifier", False, 1e-12),
        ("GPT-2", True, 1e-12),
        ("Llama", True, 1e-5),
        ("ModernBERT", False, 1e-5),
        ("BART", False, 1e-12),
        ("BART, classifier", False, 1e-12),
    ],
)
def test_padding_changes_no_statistic(name, left, tolerance):
    """T26: the statistics of a padded batch are those of the examples without padding, put together."""
    family = FAMILY[name]
    model, batch = family.make(), family.batch(left=left)
    parity = None if name == "BART, classifier" else lambda ids: {"even": ids % 2 == 0, "odd": ids % 2 == 1}
    read = 0 if name == "BERT, token classifier" else -1  # the last position is real where padding is on the left

    def of(outputs, batch):
        return outputs.logits.reshape(len(batch), -1)[:, read].exp()

    together = gr.attention_report(model, batch, of, kinds=parity)
    alone = []
    for row in range(3):
        real = batch.inputs["attention_mask"][row].bool()
        inputs = {key: value[row : row + 1] for key, value in batch.inputs.items()}
        for key in ("input_ids", "attention_mask"):
            inputs[key] = inputs[key][:, real]
        alone.append(gr.attention_report(model, gr.Batch(inputs), of, kinds=parity))
    for title, side in together.sides.items():
        own = [one.sides[title] for one in alone]
        assert torch.equal(side.queries, sum(one.queries for one in own))
        assert bool((side.table["gradient"] > 0).all())
        for quantity, kind in itertools.product(QUANTITIES, side.kinds):
            total, count = 0.0, 0
            for one in own:
                if kind in one.kinds:
                    pairs = one.pairs[:, :, one.kinds.index(kind)]
                    total = total + one.get(quantity, kind) * (one.queries if quantity in PER_QUERY else pairs)
                    count = count + pairs
            expected = total / (side.queries if quantity in PER_QUERY else count)
            torch.testing.assert_close(side.get(quantity, kind), expected, atol=tolerance, rtol=tolerance)


def test_padding_that_the_model_is_not_told_of_counts_nowhere():
    """Positions that the caller says are not real are neither queries nor keys, though the model sees them."""
    family = FAMILY["BERT, token classifier"]
    net, batch = family.make(), family.batch(padded=False)
    ids = batch.inputs["input_ids"]
    real = torch.ones_like(ids, dtype=torch.bool)
    real[0, -2:] = False
    report = gr.attention_report(net, {"input_ids": ids}, first_logit, valid=real)
    side = report.sides["self"]
    lengths = real.sum(1)
    assert bool((side.queries == lengths.sum()).all())
    assert bool((side.pairs == lengths.square().sum()).all())
    maps = gr.gradients(net, {"input_ids": ids}, first_logit, gr.AttentionMaps(0))
    (gradient,) = maps.values()
    pairs = (real[:, None, :, None] & real[:, None, None, :]).expand_as(gradient)
    expected = [gradient[:, head].abs()[pairs[:, head]].mean() for head in range(gradient.shape[1])]
    torch.testing.assert_close(report.get("gradient", "all")[0], torch.stack(expected))


def first_logit(outputs, batch):
    return outputs.logits[:, 0, 0]


def test_a_constant_added_to_a_row_leaves_the_centered_quantities():
    weights = torch.softmax(torch.randn(2, 3, 4, 5, dtype=torch.float64), -1)
    gradient = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    kinds = torch.rand(3, 2, 5) > 0.5
    real = torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 5, dtype=torch.bool)
    before = sums(weights, gradient, kinds, *real).means()
    after = sums(weights, gradient + 7 * torch.randn(2, 3, 4, 1, dtype=torch.float64), kinds, *real).means()
    for quantity in ("centered_gradient", "score_gradient", "joint_score_gradient"):
        torch.testing.assert_close(after[quantity], before[quantity], atol=1e-12, rtol=1e-12)
    for quantity in ("gradient", "signed_gradient", "weighted_gradient"):
        assert not torch.allclose(after[quantity], before[quantity])


class Scored(nn.Module):
    """One attention whose scores can be reached: `bias` is added to them."""

    def __init__(self):
        super().__init__()
        self.attention = Attend()
        self.out = nn.Linear(6, 1)

    def forward(self, x, bias):
        return torch.tanh(self.out(self.attention(x, bias))).sum(1)


class Attend(nn.Module):
    def forward(self, x, bias):
        n, length, width = x.shape
        heads = x.view(n, length, 2, width // 2).transpose(1, 2)
        return (
            F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)
            .transpose(1, 2)
            .reshape(n, length, width)
        )


def scored():
    model = Scored().double()
    x, bias = torch.randn(3, 5, 6, dtype=torch.float64), torch.zeros(3, 2, 5, 5, dtype=torch.float64)
    kinds = {"a": torch.rand(3, 5) > 0.5}
    kinds["b"] = ~kinds["a"]
    return model, gr.Batch({"x": x, "bias": bias}), kinds


def test_the_score_gradient_is_the_gradient_by_the_scores():
    model, batch, kinds = scored()
    of = gr.logit(0)
    report = gr.attention_report(model, batch, of, kinds=kinds)
    scores = batch.inputs["bias"].clone().requires_grad_()
    (by_scores,) = torch.autograd.grad(model(batch.inputs["x"], scores).sum(), scores)
    for kind, mask in kinds.items():
        of_kind = by_scores * mask[:, None, None, :]
        expected = of_kind.abs().sum((0, 2, 3)) / (5 * mask.sum())
        torch.testing.assert_close(report.get("score_gradient", kind)[0], expected, atol=1e-12, rtol=1e-12)
        expected = of_kind.sum((0, 2, 3)) / 15
        torch.testing.assert_close(report.get("joint_score_gradient", kind)[0], expected, atol=1e-12, rtol=1e-12)


def test_the_joint_score_gradient_is_what_raising_all_scores_of_a_kind_does():
    model, batch, kinds = scored()
    report = gr.attention_report(model, batch, gr.logit(0), kinds=kinds)
    step = 1e-5
    raised = kinds["a"][:, None, None, :].expand(3, 2, 5, 5) * step
    x = batch.inputs["x"]
    change = (model(x, raised).sum() - model(x, -raised).sum()).detach() / (2 * step)
    torch.testing.assert_close(report.get("joint_score_gradient", "a").sum() * 15, change, atol=1e-8, rtol=1e-8)
    shares = sum(report.get("attention", kind) for kind in kinds)
    torch.testing.assert_close(shares, torch.ones_like(shares))
    zero = sum(report.get("joint_score_gradient", kind) for kind in kinds)
    torch.testing.assert_close(zero, torch.zeros_like(zero), atol=1e-12, rtol=0)


class Backwards(nn.Module):
    """Its layers run from the last to the first."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True) for _ in range(layers)
        )

    def forward(self, inputs):
        for layer in reversed(self.layers):
            inputs = layer(inputs)
        return inputs.sum(1)


def test_layers_are_ordered_by_name_and_by_number():
    model, x = Backwards(12).eval(), torch.randn(2, 3, 4)
    report = gr.attention_report(model, x, gr.logit(0))
    side = report.sides["self"]
    assert side.layers == tuple(range(12))
    assert side.maps == tuple(f"layers.{layer}.self_attn:attention" for layer in range(12))
    gradients = gr.gradients(model, x, gr.logit(0), gr.AttentionMaps())
    expected = torch.stack([gradients[key].abs().mean((0, 2, 3)) for key in side.maps])
    torch.testing.assert_close(report.get("gradient", "all"), expected)
    some = gr.attention_report(model, x, gr.logit(0), layers=(11, 3))
    assert some.sides["self"].layers == (3, 11)
    torch.testing.assert_close(some.get("gradient", "all"), expected[[3, 11]])


def test_layers_that_share_a_module_are_its_calls():
    family = FAMILY["ALBERT"]
    side = gr.attention_report(family.make(), family.batch(), gr.logit(0)).sides["self"]
    assert side.layers == (0, 1)
    assert [key.rpartition("#")[2] for key in side.maps] == ["0", "1"]


def test_queries_of_some_kinds_alone():
    family = FAMILY["BERT, token classifier"]
    batch = token_batch(family)
    report = gr.attention_report(family.make(), batch, TOKENS, kinds=kinds_of, queries=["even", "first"])
    maps, (gradients,) = eager_maps(family.make("eager"), batch, TOKENS)
    mask, kinds = batch.inputs["attention_mask"].bool(), kinds_of(batch.inputs["input_ids"])
    compare(report.sides["self"], maps, gradients, kinds, mask & (kinds["even"] | kinds["first"]), mask)


def test_chunks_change_nothing():
    family = FAMILY["BERT, token classifier"]
    model, batch = family.make(), token_batch(family, 5)
    whole = gr.attention_report(model, batch, TOKENS, kinds=kinds_of)
    parts = gr.attention_report(model, batch, TOKENS, kinds=kinds_of, chunk_size=2)
    for quantity in QUANTITIES:
        torch.testing.assert_close(parts.table["self"][quantity], whole.table["self"][quantity], atol=1e-13, rtol=1e-12)
    assert torch.equal(parts.sides["self"].pairs, whole.sides["self"].pairs)


def contrastive(outputs, batch):
    vectors = F.normalize(outputs.logits.mean(1), dim=-1)
    return F.cross_entropy(vectors @ vectors.T, torch.tensor([1, 0, 1])[: len(vectors)], reduction="none")


def test_coupled_examples_are_refused_one_by_one_and_summed_over_the_batch():
    family = FAMILY["BERT, token classifier"]
    batch = token_batch(family)
    with pytest.raises(gr.errors.CoupledExamplesError):
        gr.attention_report(family.make(), batch, contrastive, kinds=kinds_of)
    report = gr.attention_report(family.make(), batch, contrastive, kinds=kinds_of, per="batch")
    maps, (gradients,) = eager_maps(family.make("eager"), batch, contrastive)
    mask = batch.inputs["attention_mask"].bool()
    compare(report.sides["self"], maps, gradients, kinds_of(batch.inputs["input_ids"]), mask, mask)


def test_a_report_can_be_trained_on():
    family = FAMILY["BERT, token classifier"]
    model, eager, batch = family.make(), family.make("eager"), token_batch(family)
    report = gr.attention_report(model, batch, TOKENS, kinds=kinds_of, differentiable=True)
    quantities = ("attention", "centered_gradient", "score_gradient", "weighted_gradient")
    penalty = sum(report.get(quantity, "even").sum() for quantity in quantities)
    found = torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)
    maps, (gradients,) = eager_maps(eager, batch, TOKENS, create_graph=True)
    mask, kinds = batch.inputs["attention_mask"].bool(), kinds_of(batch.inputs["input_ids"])
    expected = 0.0
    for weights, gradient in zip(maps, gradients, strict=True):
        for head in range(weights.shape[1]):
            own = plainly(weights[:, head], gradient[:, head], kinds["even"], mask, mask)
            expected = expected + sum(own[quantity] for quantity in quantities)
    for value, wanted in zip(
        found, torch.autograd.grad(expected, list(eager.parameters()), allow_unused=True), strict=True
    ):
        assert (value is None) == (wanted is None)
        if value is not None:
            torch.testing.assert_close(value, wanted, atol=1e-9, rtol=1e-8)
    assert sum(value is not None and bool(value.abs().max() > 0) for value in found) > 10
    str(report), report.to_dict()


def state(model):
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [parameter.grad for parameter in model.parameters()],
        [(module.training, len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()],
        copy.deepcopy(model.config.to_dict()),
        model.config._attn_implementation,
        torch.get_rng_state(),
    )


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_is_left_behind(raises):
    family = FAMILY["BERT, token classifier"]
    model, batch = family.make().train(), token_batch(family)
    before, function = state(model), F.scaled_dot_product_attention

    def of(outputs, batch):
        if raises:
            raise KeyError("of the user")
        return outputs.logits[:, 0, 0]

    if raises:
        with pytest.raises(KeyError):
            gr.attention_report(model, batch, of, kinds=kinds_of)
    else:
        report = gr.attention_report(model, batch, of, kinds=kinds_of)
        assert not any(value.requires_grad for value in report.table["self"].values())
    after = state(model)
    for one, other in zip(before, after, strict=True):
        if isinstance(one, dict) and all(isinstance(value, torch.Tensor) for value in one.values()):
            assert all(torch.equal(value, other[name]) for name, value in one.items())
        elif isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other
    assert F.scaled_dot_product_attention is function


def test_images_have_no_ids():
    family = FAMILY["ViT"]
    model, batch = family.make(), family.batch()
    whole = gr.attention_report(model, batch, gr.logit(0))
    assert whole.sides["self"].kinds == ("all",)
    first = torch.zeros(3, 5, dtype=torch.bool)
    first[:, 0] = True
    report = gr.attention_report(model, batch, gr.logit(0), kinds={"[CLS]": first, "patch": ~first})
    total = report.get("attention", "[CLS]") + report.get("attention", "patch")
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)
    with pytest.raises(gr.errors.BatchError, match="5 positions"):
        gr.attention_report(model, batch, gr.logit(0), kinds={"[CLS]": first[:, :4]})


def test_what_does_not_occur_is_named_and_has_no_number():
    family = FAMILY["BERT, token classifier"]
    model, batch = family.make(), token_batch(family)
    kinds = {**kinds_of(batch.inputs["input_ids"]), "nowhere": torch.zeros(3, 7, dtype=torch.bool)}
    kinds["padding"] = batch.inputs["attention_mask"] == 0
    report = gr.attention_report(model, batch, TOKENS, kinds=kinds)
    side = report.sides["self"]
    assert side.absent == ("nowhere", "padding")
    assert side.kinds == ("first", "even", "rest")
    assert all(bool(value.isfinite().all()) for value in side.table.values())
    assert "absent: nowhere, padding" in str(report)
    with pytest.raises(gr.errors.UnknownNameError, match="no query sees"):
        report.get("gradient", "nowhere")
    with pytest.raises(gr.errors.UnknownNameError, match="'first'"):
        report.get("gradient", "frist")
    with pytest.raises(gr.errors.UnknownNameError, match="centered_gradient"):
        report.get("centred", "first")
    with pytest.raises(gr.errors.UnknownNameError, match="'self'"):
        report.get("gradient", "first", side="cross")
    with pytest.raises(gr.errors.UnknownNameError, match=r"there are 'all'. Give attention_report tokenizer="):
        gr.attention_report(model, batch, TOKENS).get("gradient", "[SEP]")


def test_a_kind_that_one_layer_does_not_see():
    """Queries of a causal model see nothing behind them; a number that is no measurement is None in JSON."""
    report = gr.attention_report(
        FAMILY["GPT-2"].make(),
        FAMILY["GPT-2"].batch(padded=False),
        lambda outputs, batch: outputs.logits[:, -1, 0],
        kinds=lambda ids: {"last": torch.arange(7).expand(3, 7) == 6, "first": torch.arange(7).expand(3, 7) == 0},
        queries="first",
    )
    assert report.sides["self"].absent == ("last",)
    torch.testing.assert_close(report.get("attention", "first"), torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kinds": {"a": torch.ones(3, 6, dtype=torch.bool)}}, r"kinds\['a'\] has shape \(3, 6\).*\[3, 7\]"),
        ({"kinds": {"a": torch.ones(3, 7)}}, "torch.float32; masks are torch.bool"),
        ({"kinds": {"a": 3}}, "is a int"),
        ({"kinds": lambda ids: ids > 3}, "gives a Tensor; it has to be a mapping"),
        ({"kinds": kinds_of, "queries": "evn"}, "queries names the kind 'evn'.*'even'"),
        ({"kinds": {"a": torch.zeros(3, 7, dtype=torch.bool)}, "queries": "a"}, "leaves no query"),
        ({"valid": torch.ones(2, 7)}, r"\[3, L\]"),
        ({"valid": {"sources": torch.ones(3, 7)}}, "segment 'sources'.*'source'"),
        ({"per": "group"}, "per='group'; allowed are"),
        ({"per": "batch", "chunk_size": 1}, "all examples at once"),
        ({"layers": 7}, "no attention in layer"),
        ({"chunk_size": 0}, "chunk_size=0"),
    ],
)
def test_bad_input(options, text):
    family = FAMILY["BERT, token classifier"]
    model = family.make()
    with pytest.raises(gr.GradregError, match=text):
        gr.attention_report(model, token_batch(family), TOKENS, **options)
    if "masks" in text or "kinds" in text:  # told before the model runs
        model.forward = None
        with pytest.raises(gr.GradregError, match=text):
            gr.attention_report(model, token_batch(family), TOKENS, **options)


def test_masks_of_an_encoder_decoder_say_whose_they_are():
    family = FAMILY["BART"]
    model, batch = family.make(), family.batch()
    of = lambda outputs, batch: outputs.logits[:, -1, 5]
    source = kinds_of(batch.inputs["input_ids"])
    with pytest.raises(gr.GradregError, match="which its masks belong to"):
        gr.attention_report(model, batch, of, kinds=source)
    report = gr.attention_report(model, batch, of, kinds={"source": source})
    assert report.sides["decoder"].kinds == ("all",)
    assert report.sides["cross"].kinds == report.sides["encoder"].kinds == tuple(source)
    with pytest.raises(gr.errors.UnknownNameError, match="side=None"):
        report.get("gradient", "all")
    # without ids of the decoder its tokens are not known, and end where the source does
    bare = gr.Batch({name: batch.inputs[name] for name in ("input_ids", "attention_mask")})
    with pytest.raises(gr.GradregError, match="decoder_input_ids"):
        gr.attention_report(model, bare, of, kinds=kinds_of)
    found = gr.attention_report(model, bare, of)
    assert int(found.sides["decoder"].queries[0, 0]) == int(batch.inputs["attention_mask"].sum())


def test_saved_and_shown(tmp_path):
    family = FAMILY["T5"]
    report = gr.attention_report(
        family.make(), family.batch(), gr.loss(lambda o, t: o[:, 0, :3].sum(1)), kinds=kinds_of
    )
    path = tmp_path / "new" / "report.safetensors"
    report.save(path)
    back = gr.AttentionReport.load(path)
    assert back.to_dict() == report.to_dict()
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False)) == report.to_dict()
    assert str(back) == str(report)
    assert all(torch.equal(back.table[s][q], value) for s, t in report.table.items() for q, value in t.items())
    assert [side.maps for side in back.sides.values()] == [side.maps for side in report.sides.values()]
    assert back.provenance["torch"] == torch.__version__
    assert max(map(len, str(report).splitlines())) <= 128
    assert "cross attention: 2 layers of 2 heads, 12 queries" in str(report)
    gr.Attribution({"x": torch.ones(1, 2)}, "saliency", "token").save(path)
    with pytest.raises(gr.GradregError, match="not one that holds an attention report"):
        gr.AttentionReport.load(path)
    with pytest.raises(gr.GradregError, match="safetensors"):
        report.save(tmp_path / "report.pt")


def test_the_figure_has_a_dot_for_every_head(tmp_path):
    pytest.importorskip("matplotlib")
    family = FAMILY["BART"]
    report = gr.attention_report(family.make(), family.batch(), lambda o, b: o.logits[:, -1, 5], kinds=kinds_of)
    figure = report.plot(tmp_path / "figure.png", quantities=("attention", "gradient", "joint_score_gradient"))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert len(figure.axes) == 9
    for axes, side in zip(figure.axes[::3], report.sides.values(), strict=True):
        dots = {tuple(point) for kind in axes.collections for point in kind.get_offsets().tolist()}
        heights = sorted(height for _, height in dots)
        torch.testing.assert_close(
            torch.tensor(heights), side.table["attention"].flatten().sort().values.float(), atol=1e-6, rtol=1e-5
        )
    with pytest.raises(gr.errors.UnknownNameError, match="'gradient'"):
        report.plot(quantities=("gradients",))
