"""Padding changes nothing: gradients of padded rows are those of the rows without padding, and zero at pads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import point_values, values_and_gradients
from gradreg.errors import BatchError, GradregWarning
from tests.transformers.tiny import FAMILY, assert_near, attentions, model, run

transformers = pytest.importorskip("transformers")

WRT = (gr.Embeddings(), gr.AttentionMaps())


def at_last(outputs: Any, batch: gr.Batch) -> Tensor:
    """Logits of the example, or of its last visible token."""
    z = outputs.logits
    if z.dim() == 2:
        return z
    mask = batch.named_inputs()["attention_mask"]
    last = (mask * torch.arange(mask.shape[1])).argmax(1)
    return z[torch.arange(len(z)), last, :3]


def trimmed(batch: gr.Batch, row: int) -> gr.Batch:
    """One row without its padding."""
    visible = batch.inputs["attention_mask"][row].bool()
    return gr.Batch({name: value[row : row + 1, visible] for name, value in batch.inputs.items()})


def assert_rows_alone(net: nn.Module, batch: gr.Batch, share: float) -> None:
    """Compare every row with itself alone, at embeddings and maps, and its outputs."""
    found = gr.gradients(net, batch, at_last, WRT)
    values = point_values(net, batch, at_last, gr.Embeddings(), differentiable=False)
    for row in range(len(batch)):
        visible = batch.inputs["attention_mask"][row].bool()
        alone = gr.gradients(net, trimmed(batch, row), at_last, WRT)
        with torch.no_grad():
            expected = at_last(run(net, trimmed(batch, row)), trimmed(batch, row))
        assert_near(values[row : row + 1], expected, share)
        for key, value in alone.items():
            own = found[key][row]
            if ":attention" in key:
                assert_near(own[..., visible, :][..., visible], value[0], share, key)
            else:
                assert_near(own[:, visible], value[0], share, key)
                assert not own[:, ~visible].any()


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("BERT, classifier", 1e-14),
        ("GPT-2, classifier", 1e-14),
        ("DistilBERT", 1e-14),
        ("RoBERTa", 1e-14),
        ("Llama, classifier", 1e-6),
        ("Mistral", 1e-6),
    ],
)
def test_t12_right_padding(name: str, share: float) -> None:
    """Through the hook on the embeddings; the naive way, `inputs_embeds`, reads a pad where the pooled token should be."""
    net, batch = model(name), FAMILY[name].batch()
    assert_rows_alone(net, batch, share)


@pytest.mark.parametrize("name", ["GPT-2, classifier", "Llama, classifier"])
def test_t12_inputs_embeds_are_not_the_same(name: str) -> None:
    net, batch = model(name), FAMILY[name].batch()
    embeds = net.get_input_embeddings()(batch.inputs["input_ids"])
    with torch.no_grad():
        naive = net(inputs_embeds=embeds, attention_mask=batch.inputs["attention_mask"]).logits
        right = net(**batch.inputs).logits
    assert float((naive - right)[1:].abs().max()) > 0.01


@pytest.mark.parametrize(("name", "share"), [("GPT-2", 1e-14), ("BERT, token classifier", 1e-14), ("Llama", 1e-5)])
def test_t13_left_padding(name: str, share: float) -> None:
    """Positions come from the mask; without them a model with learned positions reads shifted ones."""
    net, batch = model(name), FAMILY[name].batch(4, left=True)
    assert (batch.inputs["attention_mask"][:, 0] == 0).sum() == 3
    assert int((batch.inputs["attention_mask"][3] == 0).sum()) == 3
    assert_rows_alone(net, batch, share)
    with torch.no_grad():
        plain = at_last(run(net, batch), batch)
        right = point_values(net, batch, at_last, gr.Embeddings(), differentiable=False)
    shifted = float((plain - right).abs().max()) > 1e-3
    assert shifted == (name != "Llama")


def test_positions_that_are_given_are_left() -> None:
    net, batch = model("GPT-2"), FAMILY["GPT-2"].batch(left=True)
    given = gr.Batch({**batch.inputs, "position_ids": torch.arange(7).expand(3, 7)})
    found = point_values(net, given, at_last, gr.Embeddings(), differentiable=False)
    with torch.no_grad():
        assert_near(found, at_last(run(net, given), given), 1e-14)


def test_models_that_find_positions_themselves_are_left_alone() -> None:
    """RoBERTa counts from the token ids, beginning behind the pad's own number: positions from 0 would be others."""
    config = transformers.RobertaConfig(**FAMILY["RoBERTa"].settings)
    net, batch = transformers.RobertaForTokenClassification(config).double().eval(), FAMILY["RoBERTa"].batch(left=True)
    assert_rows_alone(net, batch, 1e-13)


def test_a_token_that_is_pooled_where_the_padding_is_is_warned_of() -> None:
    """BERT's classifier reads the first place."""
    net, batch = FAMILY["BERT, classifier"].make(), FAMILY["BERT, classifier"].batch(left=True)
    with pytest.warns(GradregWarning, match="the token that it pools"):
        found = point_values(net, batch, at_last, gr.Embeddings(), differentiable=False)
    with torch.no_grad():
        assert_near(found, run(net, batch).logits, 1e-14)


def test_small_initial_weights_do_not_decide_for_later() -> None:
    """Positions are given to a model in which they do not count yet: after training they do."""
    net, batch = FAMILY["GPT-2"].make(), FAMILY["GPT-2"].batch(left=True)
    own = net.transformer.wpe.weight.detach().clone()
    net.transformer.wpe.weight.data.zero_()
    gr.gradients(net, batch, at_last, gr.Embeddings())
    net.transformer.wpe.weight.data.copy_(own)
    assert_rows_alone(net, batch, 1e-14)


def test_left_padding_that_cannot_be_put_right_is_warned_of() -> None:
    net, batch = FAMILY["BART"].make(), FAMILY["BART"].batch(left=True)
    with pytest.warns(GradregWarning, match="padded on the left"):
        gr.gradients(net, batch, lambda outputs, _: outputs.logits[:, 1, :3], gr.Embeddings())


@pytest.mark.parametrize("name", ["T5", "Mamba"])
def test_left_padding_that_does_no_harm_is_not(name: str) -> None:
    gr.gradients(
        FAMILY[name].make(), FAMILY[name].batch(left=True), lambda out, _: out.logits[:, -1, :3], gr.Embeddings()
    )


def test_positions_reach_a_model_inside_heads() -> None:
    class Head(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden[:, -1])

    base = model("GPT-2").transformer
    net = gr.SharedBase(base, [Head(16, 3).double() for _ in range(2)], select="last_hidden_state")
    batch = FAMILY["GPT-2"].batch(left=True)
    found = gr.gradients(net, batch, gr.all_logits(), gr.Embeddings())
    assert list(found) == ["base.wte"]
    for row in range(3):
        alone = gr.gradients(net, trimmed(batch, row), gr.all_logits(), gr.Embeddings())["base.wte"]
        assert_near(found["base.wte"][row][:, :, batch.inputs["attention_mask"][row].bool()], alone[0], 1e-13)


@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float64])
def test_an_example_whose_mask_hides_everything_is_refused(kind: torch.dtype) -> None:
    batch = FAMILY["BERT, classifier"].batch()
    mask = batch.inputs["attention_mask"].clone()
    mask[1] = 0
    with pytest.raises(BatchError, match="hides every token of example 1"):
        gr.gradients(
            model("BERT, classifier"), gr.Batch({**batch.inputs, "attention_mask": mask.to(kind)}), at_last, WRT
        )


def test_a_mask_of_a_models_own_that_is_added_is_no_padding() -> None:
    class Adding(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return ((x + attention_mask).softmax(-1) * x).sum(-1, keepdim=True)

    mask = torch.tensor([[0.0, 0.0, -5.0], [0.0, -5.0, -5.0]])
    found = gr.gradients(Adding(), {"x": torch.randn(2, 3), "attention_mask": mask}, gr.logit(0), gr.Inputs("x"))
    assert found["x"].shape == (2, 3)


def test_t26_statistics_of_maps_are_those_of_unpadded_examples() -> None:
    """What a masked key would do is not zero: it is told by its weight, which is."""
    net, batch = model("BERT, classifier"), FAMILY["BERT, classifier"].batch()
    found = gr.gradients(net, batch, at_last, gr.AttentionMaps())
    with torch.no_grad():
        weights = attentions(run(model("BERT, classifier", "eager"), batch, output_attentions=True))
    for (key, value), weight in zip(found.items(), weights, strict=True):
        hidden = (batch.inputs["attention_mask"] == 0)[:, None, None].expand_as(weight)
        assert torch.equal(weight == 0, hidden)
        assert value[2].abs()[:, hidden[2]].max() > 0.01 * value[2].abs().max()
        for row in range(3):
            visible = batch.inputs["attention_mask"][row].bool()
            alone = gr.gradients(net, trimmed(batch, row), at_last, gr.AttentionMaps())[key][0]
            mine = value[row].abs() * (weight[row] > 0) * visible[:, None]
            assert_near(mine.sum((-1, -2)) / visible.sum() ** 2, alone.abs().mean((-1, -2)), 1e-13)


def test_values_and_gradients_take_the_same_positions() -> None:
    net, batch = model("GPT-2"), FAMILY["GPT-2"].batch(left=True)
    table = net.transformer.wte(batch.inputs["input_ids"]).detach()
    values, found = values_and_gradients(net, batch, at_last, gr.Embeddings(), at={"transformer.wte": table})
    assert_near(values, point_values(net, batch, at_last, gr.Embeddings(), differentiable=False), 1e-14)
    assert_near(found["transformer.wte"], gr.gradients(net, batch, at_last, gr.Embeddings())["transformer.wte"], 1e-14)


def test_a_misspelled_mask_is_no_mask() -> None:
    """Models of transformers take any name, and would run without the mask."""
    family = FAMILY["GPT-2, classifier"]
    net, inputs = family.make(), dict(family.batch().inputs)
    inputs["atention_mask"] = inputs.pop("attention_mask")
    with pytest.raises(BatchError, match="'atention_mask'"):
        gr.gradients(net, inputs, gr.all_logits(), gr.Embeddings())
