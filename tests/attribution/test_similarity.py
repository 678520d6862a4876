"""`explain_similarity` against one autograd call per token."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradreg as gr
from tests.attribution.similar_models import (
    CASES,
    CAUSAL,
    EOS,
    PAD,
    SEQ2SEQ,
    bart,
    bert_classifier,
    cosine,
    gpt2,
    ids,
    llama,
    made,
    matrix,
    names_of,
    row,
    t5,
    token_gradients,
    token_losses,
)

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", CASES)
def test_everything_equals_brute_force(name):
    build, (a, b), shift, tolerance = CASES[name]
    model = made(build)
    r = gr.explain_similarity(model, a, b)
    rows = token_gradients(model, a, shift), token_gradients(model, b, shift)
    A, B = (matrix(one) for one in rows)
    G, H = A.sum(0), B.sum(0)
    close = {"rtol": tolerance, "atol": tolerance}
    assert r.cosine == pytest.approx(cosine(G, H), abs=tolerance)
    assert r.dot == pytest.approx(float(G @ H), rel=tolerance, abs=tolerance * float(G.norm() * H.norm()))
    torch.testing.assert_close(r.token_pairs, A @ B.T / (G.norm() * H.norm()), **close)
    assert float(r.token_pairs.sum()) == pytest.approx(r.cosine, abs=1e-8)
    for tokens, own, total, example in ((r.tokens_a, A, G, a), (r.tokens_b, B, H, b)):
        assert [one.loss for one in tokens] == pytest.approx([x.item() for x in token_losses(model, example, shift)])
        assert [one.norm for one in tokens] == pytest.approx(own.norm(dim=1).tolist(), rel=tolerance)
        assert [one.share for one in tokens] == pytest.approx((own @ total / (total @ total)).tolist(), abs=tolerance)
        assert sum(one.share for one in tokens) == pytest.approx(1)
    assert sum(group.contribution for group in r.groups) == pytest.approx(r.cosine, abs=1e-8)
    assert sum(group.share_a for group in r.groups) == pytest.approx(1)
    assert {name for group in r.groups for name in group.parameters} == {name for name, _ in model.named_parameters()}
    for group in r.groups:
        g, h = (matrix(one, group.parameters).sum(0) for one in rows)
        assert group.share_b == pytest.approx(float(h @ h / (H @ H)), abs=tolerance)
        assert group.contribution == pytest.approx(float(g @ h / (G.norm() * H.norm())), abs=tolerance)
        if float(g.norm() * h.norm()) > 1e-6:
            assert group.cosine == pytest.approx(cosine(g, h), abs=100 * tolerance)
    norms = names_of(r, "norms")
    embeddings = {n for c in r.cells if c.kind == "embeddings" for n in c.parameters}
    unit = [one / one.norm(dim=1, keepdim=True) for one in (A, B)]
    if len(A) > 1:
        assert r.what_ifs["unit-normalized tokens"].cosine == pytest.approx(
            cosine(unit[0].sum(0), unit[1].sum(0)), abs=tolerance
        )
    for key, dropped in (("without norms", set(norms)), ("without embeddings and LM head", embeddings)):
        kept = [n for n in rows[0][0] if n not in dropped]
        g, h = (matrix(one, kept).sum(0) for one in rows)
        assert r.what_ifs[key].cosine == pytest.approx(cosine(g, h), abs=tolerance)


def test_what_ifs_that_leave_tokens_out_equal_runs_without_them():
    model = made(gpt2)
    r = gr.explain_similarity(model, *CAUSAL, prompt=4)
    cut = {
        "without the end token": (ids(-100, -100, -100, 7, -100), ids(-100, -100, -100, 7, 8, -100)),
        "without the new tokens": (ids(-100, -100, -100, 7, EOS), ids(-100, -100, -100, 7, -100, EOS)),
        "shared prefix only": (ids(-100, -100, -100, 7, -100), ids(-100, -100, -100, 7, -100, -100)),
        "prompt masked": (ids(-100, -100, -100, -100, EOS), ids(-100, -100, -100, -100, 8, EOS)),
    }
    assert cut.keys() <= r.what_ifs.keys()
    for name, labels in cut.items():
        again = gr.explain_similarity(
            model, *({**example, "labels": own} for example, own in zip(CAUSAL, labels, strict=True))
        )
        assert r.what_ifs[name].cosine == pytest.approx(again.cosine, abs=1e-10), name
        assert r.what_ifs[name].dot == pytest.approx(again.dot), name
    # a causal decoder sees the same prefix: the same gradients
    assert r.what_ifs["shared prefix only"].cosine == pytest.approx(1, abs=1e-12)
    assert next(iter(r.what_ifs)) == "as given"
    assert r.what_ifs["as given"].cosine == pytest.approx(r.cosine, abs=1e-14)
    assert r.what_ifs["without the new tokens"].dropped_b == ("#8",)
    masked = r.what_if(weights_a=[1, 0], weights_b=torch.tensor([1.0, 1.0, 0.0]))
    assert masked.cosine == pytest.approx(r.what_ifs["without the end token"].cosine)
    own = r.what_if(groups=["norms"])
    assert own.cosine == pytest.approx(next(group.cosine for group in r.groups if group.name == "norms"))
    with pytest.raises(gr.GradregError, match=r"weights_a has shape \(3,\); there are 2 tokens"):
        r.what_if(weights_a=[1, 1, 1])
    with pytest.raises(gr.GradregError, match="weights_b='x' are no weights"):
        r.what_if(weights_b="x")
    with pytest.raises(gr.GradregError, match="There is no group 'norm'; there are 'norms'"):
        r.what_if(groups=["norm"])


def test_reduction_changes_the_dot_product_only():
    model = made(bart)
    total = gr.explain_similarity(model, *SEQ2SEQ)
    mean = gr.explain_similarity(model, *SEQ2SEQ, of=gr.loss(F.cross_entropy, mean=True))
    assert mean.cosine == pytest.approx(total.cosine, abs=1e-12)
    assert mean.dot == pytest.approx(total.dot / 6)
    assert f"{total.dot / 6:.4g} for means" in total.reduction


def test_identical_examples_and_exchanged_ones():
    model = made(t5)
    same = gr.explain_similarity(model, SEQ2SEQ[1], SEQ2SEQ[1])
    assert same.cosine == pytest.approx(1, abs=1e-12)
    assert same.divergence is None
    one, other = gr.explain_similarity(model, *SEQ2SEQ), gr.explain_similarity(model, *reversed(SEQ2SEQ))
    torch.testing.assert_close(one.token_pairs, other.token_pairs.T, rtol=1e-6, atol=1e-8)
    assert one.cosine == pytest.approx(other.cosine, abs=1e-8)


def padded(example, inputs, labels):
    more = {
        "input_ids": F.pad(example["input_ids"], (0, inputs), value=PAD),
        "attention_mask": F.pad(example["attention_mask"], (0, inputs), value=0),
    }
    return {**more, "labels": F.pad(example["labels"], (0, labels), value=-100)}


@pytest.mark.parametrize(("build", "pair", "labels"), [(bart, SEQ2SEQ, 2), (llama, CAUSAL, 3), (t5, SEQ2SEQ, 1)])
def test_padding_changes_nothing(build, pair, labels):
    model = made(build)
    plain = gr.explain_similarity(model, *pair)
    more = gr.explain_similarity(model, padded(pair[0], 3, 3 if build is llama else labels), pair[1])
    torch.testing.assert_close(more.token_pairs, plain.token_pairs, rtol=1e-6, atol=1e-7)
    assert [one.text for one in more.tokens_a] == [one.text for one in plain.tokens_a]


def test_left_padding_is_right_with_positions_and_named_without():
    model = made(gpt2)
    plain = gr.explain_similarity(model, *CAUSAL)
    left = {name: F.pad(value, (2, 0), value=-100 if name == "labels" else 0) for name, value in CAUSAL[0].items()}
    placed = {**left, "position_ids": (left["attention_mask"].cumsum(1) - 1).clamp(min=0)}
    r = gr.explain_similarity(model, placed, CAUSAL[1])
    torch.testing.assert_close(r.token_pairs, plain.token_pairs, rtol=1e-9, atol=1e-9)
    assert r.notes == ()
    (note,) = gr.explain_similarity(model, left, CAUSAL[1]).notes
    assert note.startswith("batch_a is padded on the left without position_ids")


def test_half_precision_is_taken_to_float32():
    model = made(gpt2)
    plain = gr.explain_similarity(model, *CAUSAL)
    half = gr.explain_similarity(model.to(torch.bfloat16), *CAUSAL)
    assert half.cosine == pytest.approx(plain.cosine, abs=0.05)
    assert float(half.token_pairs.sum()) == pytest.approx(half.cosine, abs=1e-8)
    assert half.provenance["dtype"] == "bfloat16"


def test_less_memory_takes_more_passes_and_gives_the_same():
    model = made(gpt2)
    others = [row(ids(9, 8, 7, EOS), ids(9, 8, 7, EOS)), row(ids(4, 4, EOS), ids(4, 4, EOS))]
    plain = gr.explain_similarity(model, *CAUSAL, calibration=others)
    small = gr.explain_similarity(model, *CAUSAL, calibration=others, memory=20_000)
    torch.testing.assert_close(small.gram, plain.gram, rtol=1e-9, atol=1e-9)
    for one, other in zip(small.cells, plain.cells, strict=True):
        torch.testing.assert_close(one.gram, other.gram, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(small.calibration.with_a["as given"], plain.calibration.with_a["as given"])


def test_first_difference_has_loss_and_rank_of_both_candidates():
    model = made(gpt2)
    r = gr.explain_similarity(model, *CAUSAL)
    logits = model(input_ids=CAUSAL[0]["input_ids"]).logits[0, 3].detach()
    scores = logits.log_softmax(-1)
    assert r.divergence.index == 1
    assert (r.divergence.text_a, r.divergence.text_b) == (f"#{EOS}", "#8")
    for candidate, token in zip(r.divergence.in_a, (EOS, 8), strict=True):
        assert candidate.loss == pytest.approx(-float(scores[token]))
        assert candidate.rank == sorted(scores.tolist(), reverse=True).index(float(scores[token])) + 1
    # up to there both examples are the same, so both see the same candidates
    for one, other in zip(r.divergence.in_b[::-1], r.divergence.in_a, strict=True):
        assert (one.text, one.rank) == (other.text, other.rank)
        assert one.loss == pytest.approx(other.loss)
    shorter = gr.explain_similarity(
        model, {**CAUSAL[0], "labels": ids(-100, -100, -100, 7, -100)}, {**CAUSAL[1], "labels": CAUSAL[1]["labels"]}
    )
    assert shorter.divergence.text_a is None
    assert shorter.divergence.in_a == ()


def test_calibration_equals_a_report_per_pair():
    model = made(gpt2)
    others = [
        row(ids(*ask, *answer, EOS), ids(*[-100] * len(ask), *answer, EOS))
        for ask, answer in (((3, 4), (9,)), ((6, 5, 4), (8, 7)), ((9,), (10, 11)))
    ]
    r = gr.explain_similarity(model, *CAUSAL, calibration=others)
    c = r.calibration
    assert c.count == 3
    examples = [*CAUSAL, *others]
    for key in ("as given", "without the end token"):

        def pair(i, j, key=key):
            return gr.explain_similarity(model, examples[i], examples[j]).what_ifs[key].cosine

        with_a, with_b = [pair(0, 2 + k) for k in range(3)], [pair(1, 2 + k) for k in range(3)]
        among = [pair(2, 3), pair(2, 4), pair(3, 4)]
        for found, expected in ((c.with_a, with_a), (c.with_b, with_b), (c.among, among)):
            assert found[key].tolist() == pytest.approx(expected, abs=1e-9)
        own = pair(0, 1)
        reference = [*with_a, *with_b, *among]
        assert sorted(c.reference(key).tolist()) == pytest.approx(sorted(reference), abs=1e-9)
        assert c.percentile[key] == pytest.approx(100 * sum(one < own for one in reference) / len(reference))
        assert c.rank[key] == 1 + sum(one > own for one in with_a)
    assert "calibration, 3 others" in str(r)


def test_calibration_as_a_padded_batch_equals_the_list():
    model = made(llama)
    others = [row(ids(3, 4, 9, EOS), ids(-100, 4, 9, EOS)), row(ids(6, 7, EOS), ids(-100, 7, EOS))]
    short = padded(others[1], 1, 1)
    batch = {name: torch.cat([others[0][name], short[name]]) for name in short}
    one = gr.explain_similarity(model, *CAUSAL, calibration=others).calibration
    other = gr.explain_similarity(model, *CAUSAL, calibration=batch).calibration
    for part in ("with_a", "with_b", "among"):
        for key, found in getattr(one, part).items():
            torch.testing.assert_close(getattr(other, part)[key], found, rtol=1e-5, atol=1e-7)


def test_a_causal_model_without_labels_takes_its_own_tokens():
    model = made(gpt2)
    with_mask = {name: F.pad(CAUSAL[0][name], (0, 2), value=0) for name in ("input_ids", "attention_mask")}
    r = gr.explain_similarity(model, with_mask, {"input_ids": CAUSAL[1]["input_ids"]})
    assert [one.id for one in r.tokens_a] == [4, 5, 7, EOS]
    assert [one.position for one in r.tokens_a] == [1, 2, 3, 4]
    explicit = gr.explain_similarity(model, *({**one, "labels": one["input_ids"]} for one in CAUSAL))
    assert r.cosine == pytest.approx(explicit.cosine, abs=1e-10)


def test_tied_weights_are_one_group_with_a_name():
    tied = gr.explain_similarity(made(gpt2), *CAUSAL)
    assert names_of(tied, "embeddings (tied to lm_head)") == ("transformer.wte.weight",)
    assert tied.provenance["tied"] == {"transformer.wte.weight": ["lm_head.weight"]}
    apart = gr.explain_similarity(made(llama), *CAUSAL)
    assert names_of(apart, "output head (lm_head)") == ("lm_head.weight",)
    assert [group.name for group in apart.groups if "layer" in group.name] == [
        f"{layers} {part}" for layers in ("layer 0", "layer 1", "layers 2-3") for part in ("attention", "MLP")
    ]
    shared = gr.explain_similarity(made(t5), *SEQ2SEQ)
    assert "decoder layer 1 cross-attention" in {group.name for group in shared.groups}


def test_groups_of_the_users_own():
    model = made(gpt2)
    mapped = gr.explain_similarity(
        model, *CAUSAL, groups={"first": "transformer.h.0.**", "table": ["**.wpe.*", "lm_head.*"]}
    )
    assert [group.name for group in mapped.groups] == ["table", "first", "the rest"]
    assert names_of(mapped, "table") == ("transformer.wte.weight", "transformer.wpe.weight")
    called = gr.explain_similarity(model, *CAUSAL, groups=lambda name: name.rpartition(".")[2])
    assert {group.name for group in called.groups} == {"weight", "bias"}
    for report in (mapped, called):
        assert sum(group.contribution for group in report.groups) == pytest.approx(report.cosine)
        # what is left out does not depend on how the rest is grouped
        assert report.what_ifs["without norms"].cosine == pytest.approx(
            gr.explain_similarity(model, *CAUSAL).what_ifs["without norms"].cosine
        )
    with pytest.raises(gr.GradregError, match=r"groups\['x'\].*matches 'nothing"):
        gr.explain_similarity(model, *CAUSAL, groups={"x": "nothing.*"})
    with pytest.raises(gr.GradregError, match="gave None; it must give the name of a group"):
        gr.explain_similarity(model, *CAUSAL, groups=lambda name: None)
    with pytest.raises(gr.GradregError, match="groups='layers'; allowed are"):
        gr.explain_similarity(model, *CAUSAL, groups="layers")


def test_some_parameters_only():
    model = made(gpt2)
    r = gr.explain_similarity(model, *CAUSAL, params=("transformer.h.1.mlp.**", "**.ln_f.*"))
    names = [name for group in r.groups for name in group.parameters]
    g, h = (matrix(token_gradients(model, one, True), names).sum(0) for one in CAUSAL)
    assert r.cosine == pytest.approx(cosine(g, h), abs=1e-10)
    assert {name.split(".")[1] for name in names} == {"h", "ln_f"}


class Tagger(nn.Module):
    """Not of transformers: a label per position, classes last."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.table, self.stack, self.out = (
            nn.Embedding(20, 8),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        return self.out(self.stack(self.table(x)))


def test_other_modules_and_scalars():
    torch.manual_seed(1)
    net = Tagger().double().eval()
    a, b = (ids(3, 4, 5, 6), ids(0, 1, -100, 2)), (ids(3, 4, 7), ids(0, 2, 2))
    r = gr.explain_similarity(net, a, b, of=gr.loss(F.cross_entropy, axis=-1))
    rows = []
    for x, y in (a, b):
        losses = F.cross_entropy(net(x)[0], y[0], reduction="none")
        rows.append(
            torch.stack(
                [
                    torch.cat(
                        [g.flatten() for g in torch.autograd.grad(one, list(net.parameters()), retain_graph=True)]
                    )
                    for one in losses[y[0] >= 0]
                ]
            )
        )
    total = rows[0].sum(0).norm() * rows[1].sum(0).norm()
    torch.testing.assert_close(r.token_pairs, rows[0] @ rows[1].T / total, rtol=1e-9, atol=1e-9)
    parts = {f"layer {k} {part}" for k in (0, 1) for part in ("attention", "MLP")}
    assert {group.name for group in r.groups} == {"embeddings", "norms", "out (Linear)", *parts}
    own = gr.explain_similarity(net, ids(3, 4, 5), ids(6, 7), of=lambda outputs, batch: outputs[..., 0])
    assert [one.text for one in own.tokens_a] == ["target 0", "target 1", "target 2"]
    assert own.token_pairs.shape == (3, 2)
    assert own.divergence is None
    line = nn.Linear(3, 1).double()
    pair = [(torch.randn(1, 3).double(), torch.randn(1).double()) for _ in range(2)]
    g, h = (
        torch.cat([x.flatten() for x in torch.autograd.grad((line(x) - y).square().sum(), list(line.parameters()))])
        for x, y in pair
    )
    assert gr.explain_similarity(line, *pair).cosine == pytest.approx(cosine(g, h))


def test_class_names_and_texts():
    model = made(bert_classifier)
    model.config.id2label = {0: "bad", 1: "fair", 2: "good"}
    _, pair, _, _ = CASES["bert_classifier"]
    r = gr.explain_similarity(model, *pair)
    assert (r.tokens_a[0].text, r.tokens_b[0].text) == ("fair", "good")
    assert list(r.what_ifs) == ["as given", "without embeddings and LM head", "without norms"]
    assert r.divergence.in_a[1].text == "good"
    words = gr.explain_similarity(made(gpt2), *CAUSAL, tokenizer=lambda found: [f"<{one}>" for one in found])
    assert [one.text for one in words.tokens_b] == ["<7>", "<8>", f"<{EOS}>"]
    with pytest.raises(gr.GradregError, match="tokenizer gave 1 texts for 2 token ids"):
        gr.explain_similarity(made(gpt2), *CAUSAL, tokenizer=lambda found: ["x"])


def test_train_mode_is_named_and_left():
    model = made(gpt2)
    plain = gr.explain_similarity(model, *CAUSAL)
    model.train()
    model.transformer.h[1].eval()
    flags = [module.training for module in model.modules()]
    r = gr.explain_similarity(model, *CAUSAL)
    assert r.cosine == pytest.approx(plain.cosine, abs=1e-12)
    assert any("train mode (it has dropout)" in note for note in r.notes)
    assert not any("train mode" in note for note in plain.notes)
    assert [module.training for module in model.modules()] == flags


def test_a_report_that_was_saved_is_the_same(tmp_path):
    model = made(gpt2)
    model.transformer.wpe.weight.requires_grad_(False)
    others = [row(ids(9, 8, 7, EOS), ids(9, 8, 7, EOS)), row(ids(4, EOS), ids(4, EOS))]
    r = gr.explain_similarity(model, *CAUSAL, calibration=others, prompt=3)
    assert any("1 frozen parameters" in note for note in r.notes)
    r.save(tmp_path / "report.safetensors")
    again = gr.SimilarityReport.load(tmp_path / "report.safetensors")
    assert str(again) == str(r)
    assert again.to_dict() == r.to_dict()
    assert torch.equal(again.gram, r.gram)
    text = json.dumps(r.to_dict(), allow_nan=False)
    plain = json.loads(text)
    assert plain["cosine"] == r.cosine
    assert plain["token_pairs"] == r.token_pairs.tolist()
    assert plain["provenance"]["of"] == "cross_entropy per token, labels one position later"
    assert plain["provenance"]["attention"] == "sdpa"
    assert max(len(line) for line in str(r).splitlines()) <= 100
    with pytest.raises(gr.GradregError, match=r"does not end in \.safetensors"):
        r.save(tmp_path / "report.json")
    with pytest.raises(gr.GradregError, match="is no file"):
        gr.SimilarityReport.load(tmp_path / "other.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "report.safetensors").read_bytes()[:200])
    with pytest.raises(gr.GradregError, match="no whole safetensors file"):
        gr.SimilarityReport.load(tmp_path / "cut.safetensors")


def state(model):
    return {
        "parameters": [
            (name, id(own), own.clone(), own.requires_grad, own.grad) for name, own in model.named_parameters()
        ],
        "buffers": [(name, own.clone()) for name, own in model.named_buffers()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "flags": [module.training for module in model.modules()],
        "config": copy.deepcopy(model.config.to_dict()),
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "random": torch.get_rng_state(),
        "grad": torch.is_grad_enabled(),
    }


def assert_same(before, after):
    for key, value in before.items():
        if key in ("parameters", "buffers"):
            for one, other in zip(value, after[key], strict=True):
                assert all(
                    torch.equal(x, y) if isinstance(x, torch.Tensor) else x is y or x == y
                    for x, y in zip(one, other, strict=True)
                )
        elif key == "random":
            assert torch.equal(value, after[key])
        else:
            assert value == after[key], key


class RefusedError(Exception):
    """Of a hook."""


@pytest.mark.parametrize("name", ["t5", "gpt2", "bert_masked"])
def test_no_side_effects(name):
    build, pair, _, _ = CASES[name]
    model = made(build).train()
    before = state(model)
    with torch.no_grad():
        gr.explain_similarity(model, *pair)
    with torch.inference_mode():
        gr.explain_similarity(model, *pair)
    assert_same(before, state(model))
    # forwards that read the examples, that take gradients, and that look at a model seen for the first time
    for number, fresh in ((1, False), (3, False), (4, False), (7, True)):
        if fresh:
            model = made(build).train()
        calls = []

        def refuse(module, args, number=number, calls=calls):
            calls.append(1)
            if len(calls) == number:
                raise RefusedError

        handle = model.register_forward_pre_hook(refuse)
        during = state(model)
        with pytest.raises(RefusedError):
            gr.explain_similarity(model, *pair)
        assert_same(during, state(model))
        handle.remove()
