"""`gradreg attribute`: every head, from texts to table, files and page; and the real models where they are."""

from __future__ import annotations

import json

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.experiments.validate import ConfigError, check
from tests.experiments.in_process import call
from tests.optional import missing

pytest.importorskip("transformers")

import transformers

from gradreg.experiments.transformers import attribute
from gradreg.experiments.transformers.load import model_problem
from tests.attribution.tokenizers_of_all_kinds import byte_level, sentence_piece, word_piece

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXTS = ["pizza games", "playing"]


def bert(kind, tokenizer, **options):
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=40, pad_token_id=tokenizer.pad_token_id, **SMALL, **options
    )
    return getattr(transformers, kind)(config)


def llama(tokenizer):
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **SMALL)
    return transformers.LlamaForCausalLM(config)


def t5(tokenizer):
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )
    return transformers.T5ForConditionalGeneration(config)


NAMES = {0: "O", 1: "B-FOOD", 2: "I-FOOD"}
MODELS = {
    "similarity": (word_piece, lambda t: bert("BertModel", t)),
    "classes": (word_piece, lambda t: bert("BertForSequenceClassification", t, id2label=NAMES)),
    "tokens": (word_piece, lambda t: bert("BertForTokenClassification", t, id2label=NAMES)),
    "mask": (word_piece, lambda t: bert("BertForMaskedLM", t)),
    "next_token": (byte_level, llama),
    "translation": (sentence_piece, t5),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders as users have them."""
    found = {}
    for name, (tokenizer, model) in MODELS.items():
        torch.manual_seed(1)
        found[name] = tmp_path_factory.mktemp(name)
        made = tokenizer()
        made.save_pretrained(found[name])
        own = model(made)
        with torch.no_grad():  # vectors of zeros and their like, which no trained model has, are no baselines
            own.get_input_embeddings().weight.copy_(torch.randn_like(own.get_input_embeddings().weight))
        own.save_pretrained(found[name])
    return found


def run(folder, out, *overrides):
    """Run the work of the command, and return what it wrote."""
    with initialize_config_module("gradreg.conf", version_base="1.3"):
        config = compose("attribute", overrides=[f"model={folder}", f"out={out}", "progress=false", *overrides])
    plain = OmegaConf.to_container(config, resolve=True)
    check(plain, attribute._problems)
    attribute._work(plain)
    return gr.Attribution.load(out / "attribution.safetensors"), json.loads((out / "attribution.json").read_text())


def complete(a, tolerance=0.02):
    size = torch.cat([value.abs() for value in a.by_key.values()], -1).sum(-1)
    assert bool((a.delta.abs() <= tolerance * torch.maximum(size, a.change.abs()) + 1e-5).all())


def test_similarity(folders, tmp_path, capsys):
    a, rows = run(folders["similarity"], tmp_path, 'texts=[["pizza games","playing pizza"],["a","games"]]')
    assert a.scores.shape[0] == 4
    assert a.target_axes == ()
    complete(a)
    names = [row["name"] for row in rows["targets"]]
    assert names == ["pair 0, text a", "pair 0, text b", "pair 1, text a", "pair 1, text b"]
    values = [row["value"] for row in rows["targets"]]
    assert values[0] == pytest.approx(values[1])  # one cosine, seen from both sides
    assert values[0] == pytest.approx(_cosine(folders["similarity"], "pizza games", "playing pizza"), abs=1e-5)
    assert "| pair 0, text a |" in capsys.readouterr().out
    assert "pair 1, text b</h2>" in (tmp_path / "attribution.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "attribution.html", "attribution.json", "attribution.safetensors", "config.yaml", "plots",
    ]  # fmt: skip
    assert len(list((tmp_path / "plots").iterdir())) == 4


def _cosine(folder, *texts):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    vectors = []
    for text in texts:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).last_hidden_state
        vectors.append(states[0].mean(0))
    return float(torch.nn.functional.cosine_similarity(*vectors, dim=0))


def test_classes(folders, tmp_path):
    a, rows = run(folders["classes"], tmp_path, f"texts={json.dumps(TEXTS)}", "quantity=probability", "k=2")
    assert a.scores.shape[:2] == (2, 3)
    assert a.target_labels == {"class": list(NAMES.values())}
    complete(a)
    assert a.scores.sum(1).abs().max() < 1e-3  # probabilities sum to one
    assert [row["name"] for row in rows["targets"][:3]] == [f"example 0, class {n} ({NAMES[n]})" for n in range(3)]
    assert sum(row["value"] for row in rows["targets"][:3]) == pytest.approx(1)
    assert all(len(row["largest"]) == 2 for row in rows["targets"])


def test_classes_of_tokens_and_words(folders, tmp_path):
    a, rows = run(folders["tokens"], tmp_path, f"texts={json.dumps(TEXTS)}", "words=true")
    assert a.target_axes == ("token", "class")
    complete(a)
    assert rows["sources"] == "words"
    assert rows["labels"] == {
        next(iter(a.by_key)): [["[CLS]", "pizza", "games", "[SEP]"], ["[CLS]", "playing", "[SEP]", ""]]
    }
    real = int(next(iter(a.valid.values())).sum())
    assert len(rows["targets"]) == real  # the class that is predicted, of every token
    assert rows["targets"][0]["name"].startswith("example 0, token 0 ([CLS]), class ")


def test_masks(folders, tmp_path):
    a, rows = run(folders["mask"], tmp_path, 'texts=["pizza [MASK]"]', "candidates=3", "baseline=mask")
    assert a.scores.shape[:2] == (1, 3)
    complete(a)
    values = [row["value"] for row in rows["targets"]]
    assert values == sorted(values, reverse=True)
    with pytest.raises(GradregError, match=r"texts\[0\] has 0 masks; goal=mask needs exactly one, written \[MASK\]"):
        run(folders["mask"], tmp_path, 'texts=["pizza"]')


def test_next_tokens(folders, tmp_path):
    """Texts of several lengths, and a tokenizer without a token for padding: each as if it were alone."""
    options = ('candidates=["a","b"]', "quantity=log_probability")
    a, _ = run(folders["next_token"], tmp_path / "both", f"texts={json.dumps(TEXTS)}", *options)
    complete(a)
    assert [one.strip() for one in a.target_labels["class"][0]] == ["a", "b"]
    assert torch.equal(a.scores[:, :, 0], torch.zeros(2, 2))  # the first token stays as it is
    for place, text in enumerate(TEXTS):
        alone, _ = run(folders["next_token"], tmp_path / str(place), f"texts={json.dumps([text])}", *options)
        length = alone.scores.shape[-1]
        assert torch.allclose(a.scores[place, :, :length], alone.scores[0], atol=1e-5)
        assert not a.scores[place, :, length:].any()
    moved, _ = run(
        folders["next_token"], tmp_path / "moved", f"texts={json.dumps(TEXTS)}", *options, "keep_first=false"
    )
    assert moved.scores[:, :, 0].abs().min() > 0
    with pytest.raises(GradregError, match=r"candidates: 'pizza games' is \d+ tokens"):
        run(folders["next_token"], tmp_path, 'candidates=["pizza games"]')


def test_translations(folders, tmp_path):
    texts = 'texts=[["pizza games","café"],["a","text and pizza"]]'
    a, rows = run(folders["translation"], tmp_path, texts, "words=true", "n_steps=200")
    assert set(a.segments.values()) == {"source", "target prefix"}
    complete(a)
    encoder, decoder = a.by_key
    assert "".join(rows["labels"][decoder][0]).startswith("<pad>café")
    assert rows["labels"][encoder][0] == ["pizza", "games", "</s>"]
    # a token of the target cannot come from tokens behind it
    scores = a.by_key[decoder]
    assert torch.equal(scores.triu(1), torch.zeros_like(scores))
    names = [row["name"] for row in rows["targets"] if row["example"] == 0]
    assert names[-1] == f"example 0, token {len(names) - 1} (</s>)"


@pytest.mark.parametrize("method", ["saliency", "input_x_gradient", "smooth_grad"])
def test_other_methods(folders, tmp_path, method):
    a, rows = run(folders["classes"], tmp_path, f"method={method}", 'texts=["pizza"]')
    assert a.method == method
    assert rows["targets"][0]["change"] is None
    assert rows["targets"][0]["largest"]


def test_norms_and_goals_that_do_not_fit(folders, tmp_path):
    _, rows = run(folders["similarity"], tmp_path, "goal=norm", 'texts=["pizza"]')
    assert rows["targets"][0]["value"] > 0
    with pytest.raises(
        GradregError, match="goal: 'mask' does not fit BertModel; allowed are auto and 'similarity', 'norm'"
    ):
        run(folders["similarity"], tmp_path, "goal=mask")
    with pytest.raises(GradregError, match=r"texts\[0\]: 'pizza' is not allowed; goal=similarity needs a pair"):
        run(folders["similarity"], tmp_path, 'texts=["pizza"]')
    with pytest.raises(GradregError, match="text 0 has 52 tokens; the model takes 1 to 40"):
        run(folders["classes"], tmp_path, f"texts={json.dumps(['a ' * 50])}")
    with pytest.raises(GradregError, match="baseline: 9999 is no token id"):
        run(folders["classes"], tmp_path, "baseline=9999")
    with pytest.raises(GradregError, match="baseline: the tokenizer has no mask token"):
        run(folders["next_token"], tmp_path, "baseline=mask")


def test_wrong_values_are_all_named():
    wrong = (
        "model=nowhere goal=norms head=cls quantity=odds method=lime baseline=zero n_steps=0 tolerance=0 k=0 "
        "texts=[] candidates=[] keep_first=maybe memory=much"
    )
    with initialize_config_module("gradreg.conf", version_base="1.3"):
        config = compose("attribute", overrides=wrong.split())
    with pytest.raises(ConfigError) as error:
        check(OmegaConf.to_container(config, resolve=True), attribute._problems)
    for key in (one.partition("=")[0] for one in wrong.split()):
        assert f"{key}:" in str(error.value), key


def test_the_command(folders, tmp_path):
    finished = call(tmp_path, "attribute", f"model={folders['classes']}", 'texts=["pizza games"]', "n_steps=5")
    assert finished.returncode == 0, finished.stderr
    assert "Written to attribute: attribution.safetensors, attribution.json" in finished.stdout
    assert (tmp_path / "attribute" / "attribution.html").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["attribute"]


@pytest.mark.parametrize("model", ["minilm", "smollm2"])
def test_real_models(tmp_path, model):
    problem = model_problem(model)
    if problem:
        missing(f"The model {model}", problem)
    if model == "minilm":
        a, rows = run(model, tmp_path, "words=true")
        best = [row["largest"][0]["label"] for row in rows["targets"][:2]]
        assert best == ["pizza", "pizza"]
    else:
        a, rows = run(model, tmp_path, 'texts=["The capital of France is"]', 'candidates=[" Paris"]', "words=true")
        assert rows["targets"][0]["largest"][0]["label"] == "France"
    complete(a)
