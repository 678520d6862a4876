"""What cannot be attributed, for every function: told in gradreg's own words, never by torch or transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import AttributionWarning, BatchError, CompatibilityError, GradregError, NonFiniteLossError
from tests.attribution.attribution_models import bert, tokens

transformers = pytest.importorskip("transformers")

NET, BATCH = bert(3), tokens([4, 6])
PAD, EMBEDDINGS = gr.token_baseline(0), gr.Embeddings()


def first(outputs: Any, batch: gr.Batch) -> Tensor:
    return outputs.logits[:, 0]


def similarity(model: Any, batch: Any) -> Any:
    halves = ({name: value[place] for name, value in batch.items()} for place in (slice(0, 1), slice(1, 2)))
    labelled = [{**half, "labels": torch.ones(1, 6, dtype=torch.long)} for half in halves]
    return gr.explain_similarity(model, *labelled)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "integrated_gradients": lambda m, b: gr.integrated_gradients(m, b, first, EMBEDDINGS, baseline=PAD, n_steps=3),
    "saliency": lambda m, b: gr.saliency(m, b, first, EMBEDDINGS),
    "input_x_gradient": lambda m, b: gr.input_x_gradient(m, b, first, EMBEDDINGS),
    "smooth_grad": lambda m, b: gr.smooth_grad(m, b, first, EMBEDDINGS, std=0.1, n_samples=2),
    "expected_gradients": lambda m, b: gr.expected_gradients(m, b, first, EMBEDDINGS, references=[PAD], n_samples=2),
    "logit_jacobian": lambda m, b: gr.logit_jacobian(m, b, EMBEDDINGS),
    "attention_report": lambda m, b: gr.attention_report(m, b, first),
    "explain_similarity": similarity,
}


def changed(**inputs: Any) -> dict[str, Any]:
    return {**BATCH, **inputs}


def one_id(value: int) -> dict[str, Any]:
    ids = BATCH["input_ids"].clone()
    ids[:, 0] = value
    return changed(input_ids=ids)


BATCHES = {
    "outside of the vocabulary": (one_id(999), "holds the token 999, but BertForTokenClassification knows 40"),
    "below zero": (one_id(-1), "holds the token -1"),
    "no integers": (changed(input_ids=BATCH["input_ids"].double()), "token ids are integers"),
    "no numbers": ({name: value.to("meta") for name, value in BATCH.items()}, "on the device 'meta'"),
    "no tokens": ({name: value[:, :0] for name, value in BATCH.items()}, "at least one token"),
    "one axis": ({"input_ids": BATCH["input_ids"][:, 0]}, "expected \\[n, L\\]"),
    "too long": ({name: torch.ones(2, 40, dtype=torch.long) for name in BATCH}, "texts of 40 tokens.*positions for 16"),
    "a mask of another length": (changed(attention_mask=BATCH["attention_mask"][:, :3]), "has shape .*the ids"),
    "a mask of three axes": (
        changed(attention_mask=BATCH["attention_mask"][:, None].expand(2, 6, 6).contiguous()),
        "attention_mask .*most models take",
    ),
}


@pytest.mark.parametrize("wrong", BATCHES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_batches_that_no_model_reads(name: str, wrong: str) -> None:
    batch, text = BATCHES[wrong]
    if wrong == "a mask of three axes" and transformers.__version__ < "5":
        pytest.skip("transformers 4 reads masks of three axes")
    if wrong == "a mask of three axes" and name == "explain_similarity":
        text = "attention_mask"
    with pytest.raises(BatchError, match=text):
        FUNCTIONS[name](NET, batch)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("model", [None, nn.Linear, lambda x: x])
def test_what_is_no_model(name: str, model: Any) -> None:
    with pytest.raises(CompatibilityError, match=r"needs a torch\.nn\.Module"):
        FUNCTIONS[name](model, BATCH)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_weights_that_hold_no_numbers(name: str) -> None:
    with pytest.raises(CompatibilityError, match="on the device 'meta'"):
        FUNCTIONS[name](bert(3).to("meta"), BATCH)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode])
def test_surroundings_without_gradients_change_nothing(name: str, surroundings: Any) -> None:
    right = FUNCTIONS[name](NET, BATCH)
    with surroundings():
        batch = {key: value.clone() for key, value in BATCH.items()}  # of inference_mode's own kind there
        found = FUNCTIONS[name](NET, batch)
    if hasattr(right, "by_key"):
        for key, value in right.by_key.items():
            torch.testing.assert_close(found.by_key[key], value, rtol=1e-12, atol=1e-14)
    elif name == "attention_report":
        torch.testing.assert_close(found.table["self"]["gradient"], right.table["self"]["gradient"])
    else:
        assert found.cosine == pytest.approx(right.cosine, abs=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_weights_that_are_not_finite_are_told(name: str) -> None:
    model = bert(3)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[BATCH["input_ids"][1, 2]] = torch.nan
    if name in ("attention_report", "explain_similarity"):
        with pytest.raises(NonFiniteLossError, match=r"example 1|batch_b"):
            FUNCTIONS[name](model, BATCH)
    else:
        with pytest.warns(AttributionWarning, match="not finite in 1 of 2 examples, example 1 first"):
            FUNCTIONS[name](model, BATCH)


@pytest.mark.parametrize("baseline", [float("nan"), float("inf"), torch.full((16,), float("nan"))])
def test_baselines_that_are_not_finite(baseline: Any) -> None:
    with pytest.raises(GradregError, match=r"holds (nan|inf)"):
        gr.integrated_gradients(NET, BATCH, first, EMBEDDINGS, baseline=baseline)
    references = torch.full((2, 6, 16), float("nan"))
    with pytest.raises(GradregError, match="holds nan"):
        gr.expected_gradients(NET, BATCH, first, EMBEDDINGS, references=references)


def test_a_baseline_of_a_token_that_there_is_not() -> None:
    with pytest.raises(BatchError, match=r"TokenBaseline\(id=4000.*holds the token 4000"):
        gr.integrated_gradients(NET, BATCH, first, EMBEDDINGS, baseline=gr.token_baseline(4000))


def test_a_baseline_that_is_the_input_is_complete() -> None:
    vectors = NET.bert.embeddings.word_embeddings(BATCH["input_ids"]).detach()
    found = gr.integrated_gradients(NET, BATCH, first, EMBEDDINGS, baseline=vectors, n_steps=3)  # no warning
    assert not found.scores.any()


OPTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "keep": (lambda: gr.token_baseline(1, keep=3), "keep=3"),
    "layers": (lambda: gr.AttentionMaps(1.5), "number of a layer"),
    "layers that are told by truth": (lambda: gr.AttentionMaps(True), "number of a layer"),
    "embeddings": (lambda: gr.Embeddings(3), "a glob is a text"),
    "activations": (lambda: gr.Activations(None), "a glob is a text"),
    "parameters": (lambda: gr.Params(0), "a glob is a text"),
    "std of text": (lambda: gr.smooth_grad(NET, BATCH, first, EMBEDDINGS, std="x"), "std='x'"),
    "std of none": (lambda: gr.smooth_grad(NET, BATCH, first, EMBEDDINGS, std=None), "std=None"),
    "samples": (
        lambda: gr.smooth_grad(NET, BATCH, first, EMBEDDINGS, std=1.0, n_samples=1.5),
        "n_samples=1.5; allowed are integers from 1",
    ),
    "samples of references": (
        lambda: gr.expected_gradients(NET, BATCH, first, EMBEDDINGS, references=[PAD], n_samples=True),
        "n_samples=True; allowed are integers from 2",
    ),
    "generator": (
        lambda: gr.smooth_grad(NET, BATCH, first, EMBEDDINGS, std=1.0, generator=3),
        "generator=3",
    ),
    "generator of references": (
        lambda: gr.expected_gradients(NET, BATCH, first, EMBEDDINGS, references=[PAD], generator=3),
        "generator=3",
    ),
    "chunk": (
        lambda: gr.smooth_grad(NET, BATCH, first, EMBEDDINGS, std=1.0, chunk_size="a"),
        "chunk_size='a'",
    ),
    "chunk that is told by truth": (
        lambda: gr.logit_jacobian(NET, BATCH, EMBEDDINGS, chunk_size=True),
        "chunk_size=True",
    ),
    "tokens": (lambda: gr.logit_jacobian(NET, BATCH, EMBEDDINGS, tokens=1), "tokens=1"),
    "half a token": (
        lambda: gr.logit_jacobian(NET, BATCH, EMBEDDINGS, tokens=[0.5]),
        "token 0.5 is no number",
    ),
    "a Jacobian of parameters": (lambda: gr.logit_jacobian(NET, BATCH, gr.Params()), "gradients of parameters"),
    "class": (
        lambda: gr.logit_jacobian(NET, BATCH, EMBEDDINGS).probability("a"),
        "class 'a' is no number",
    ),
    "targets": (
        lambda: gr.logit_jacobian(NET, BATCH, EMBEDDINGS).loss(None),
        "targets are a NoneType",
    ),
    "smoothing": (
        lambda: gr.logit_jacobian(NET, BATCH, EMBEDDINGS).loss(torch.zeros(2, 6).long(), label_smoothing=2.0),
        "label_smoothing=2.0",
    ),
    "margin": (lambda: gr.logit_jacobian(NET, BATCH, EMBEDDINGS).margin(1, 1), "from itself"),
    "kinds": (lambda: gr.attention_report(NET, BATCH, first, kinds="x"), "kinds='x'"),
    "queries": (lambda: gr.attention_report(NET, BATCH, first, queries=3), "queries=3"),
    "tokenizer": (lambda: gr.attention_report(NET, BATCH, first, tokenizer="bert"), "give a tokenizer of"),
    "target": (
        lambda: gr.attention_report(NET, BATCH, first).target("a"),
        "target 'a' is no number",
    ),
    "tokenizer of labels": (
        lambda: gr.saliency(NET, BATCH, first, EMBEDDINGS).with_tokens(None),
        "give a tokenizer of",
    ),
    "selection": (
        lambda: gr.saliency(NET, BATCH, first, EMBEDDINGS).select("example", 1.5),
        "example 1.5 is no number",
    ),
    "labels": (
        lambda: gr.Attribution({"x": torch.ones(2, 3)}, "m", "token", labels={"x": None}),
        "a list of texts for every example",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_there_are_not(name: str) -> None:
    call, text = OPTIONS[name]
    with pytest.raises(GradregError, match=text):
        call()


def test_files_that_cannot_be_written(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    found = gr.saliency(NET, BATCH, first, EMBEDDINGS)
    report = gr.attention_report(NET, BATCH, first)
    (tmp_path / "file").write_text("not a folder")
    for write in (
        lambda: found.save(tmp_path / "file" / "a.safetensors"),
        lambda: found.to_html(tmp_path / "file" / "a.html"),
        lambda: found.to_html(tmp_path),
        lambda: report.save(tmp_path / "file" / "a.safetensors"),
        lambda: report.plot(tmp_path / "file" / "a.png"),
    ):
        with pytest.raises(GradregError, match="cannot be written"):
            write()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
