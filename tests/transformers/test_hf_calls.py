"""How models of transformers are called in practice: their inputs, configurations, precisions, wrappers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import values_and_gradients
from gradreg.errors import BatchError, CompatibilityError
from tests.transformers.tiny import FAMILY, assert_all_near, assert_near, by_hand, classes, model, run, some_loss

transformers = pytest.importorskip("transformers")

OLD = transformers.__version__.startswith("4.")
WRT = (gr.Embeddings(), gr.AttentionMaps())


def test_t7_what_a_module_gives_before_it_is_changed_in_place() -> None:
    """Linear, then ReLU in place: the gradient at the linear is that behind it where the value is positive."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3).double()
    with torch.no_grad():
        before = net[0](x)
    found = gr.gradients(net, x, gr.logit(1), gr.Activations("0"))["0"]
    assert_near(found, net[2].weight[1] * (before > 0), 1e-14)
    values, _ = values_and_gradients(net, gr.Batch(x), gr.logit(1), gr.Activations("0"), at={"0": before})
    assert_near(values, net(x)[:, 1].detach(), 1e-14)


def test_t15_token_ids_have_no_gradient_and_the_message_says_what_has() -> None:
    for wrt in (gr.Inputs(), gr.Inputs("input_ids")):
        with pytest.raises(BatchError, match=r"Embeddings\(\)"):
            gr.gradients(model("BERT, classifier"), FAMILY["BERT, classifier"].batch(), gr.all_logits(), wrt)


def test_inputs_of_a_tokenizer() -> None:
    """A BatchEncoding, alone or inside of a Batch, with labels that the model does not see."""
    net, batch = model("BERT, classifier"), FAMILY["BERT, classifier"].batch()
    encoding = transformers.BatchEncoding({**batch.inputs, "labels": batch.targets})
    expected = gr.gradients(net, batch, gr.loss(F.cross_entropy), gr.Params("*"))
    assert_all_near(gr.gradients(net, encoding, gr.loss(F.cross_entropy), gr.Params("*")), expected, 1e-13)
    inside = gr.Batch(transformers.BatchEncoding(dict(batch.inputs)), batch.targets)
    for differentiable in (False, True):
        found = gr.gradients(net, inside, gr.loss(F.cross_entropy), gr.Params("*"), differentiable=differentiable)
        assert_all_near(found, expected, 1e-13)
    assert len(gr.gradients(net, encoding, gr.all_logits(), WRT)) == 3


def test_vectors_that_are_passed_themselves() -> None:
    net, batch = model("BERT, classifier"), FAMILY["BERT, classifier"].batch()
    vectors = net.get_input_embeddings()(batch.inputs["input_ids"]).detach()
    given = gr.Batch({"inputs_embeds": vectors, "attention_mask": batch.inputs["attention_mask"]})
    with pytest.raises(CompatibilityError, match="inputs_embeds"):
        gr.gradients(net, given, classes, gr.Embeddings())
    found = gr.gradients(net, given, classes, gr.Inputs("inputs_embeds"))["inputs_embeds"]
    table = gr.gradients(net, batch, classes, gr.Embeddings())["bert.embeddings.word_embeddings"]
    assert_near(found, table, 1e-13)


@pytest.mark.parametrize("name", ["BART", "T5"])
def test_what_the_encoder_gave_is_passed(name: str) -> None:
    """Only the decoder's embedding is read then, and only its maps are made."""
    net, batch = model(name), FAMILY[name].batch()
    mask = batch.inputs["attention_mask"]
    with torch.no_grad():
        encoded = net.get_encoder()(input_ids=batch.inputs["input_ids"], attention_mask=mask)
    given = {"encoder_outputs": encoded, "attention_mask": mask, "decoder_input_ids": batch.inputs["decoder_input_ids"]}
    found = gr.gradients(net, gr.Batch(given), classes, WRT)
    whole = gr.gradients(net, batch, classes, WRT)
    maps = [key for key in found if ":attention" in key]
    assert len(maps) == 4
    assert_all_near({key: found[key] for key in maps}, {key: whole[key] for key in maps}, 1e-6)
    (table,) = set(found) - set(maps)
    decoder = [key for key in whole if ":attention" not in key][-1]
    assert_near(found[table], whole[decoder], 1e-6)
    parameters = gr.gradients(net, gr.Batch(given), classes, gr.Params("*"))
    assert all(len(value) == 3 for value in parameters.values())


def test_a_cache_of_keys_and_values_is_refused() -> None:
    net, batch = model("GPT-2"), FAMILY["GPT-2"].batch(padded=False)
    cache = run(net, batch).past_key_values
    with pytest.raises(BatchError, match="'past_key_values' is a DynamicCache, which every forward writes to"):
        gr.gradients(net, {**batch.inputs, "past_key_values": cache}, classes, gr.Embeddings())


def test_one_that_is_made_in_the_forward_is_none() -> None:
    net, batch = FAMILY["Llama"].make(), FAMILY["Llama"].batch()
    with_cache, without = (gr.Batch({**batch.inputs, "use_cache": flag}) for flag in (True, False))
    for wrt in (gr.Params("*"), WRT):
        assert_all_near(gr.gradients(net, with_cache, classes, wrt), gr.gradients(net, without, classes, wrt), 1e-7)


@pytest.mark.parametrize("name", ["BERT, classifier", "Llama", "T5"])
def test_half_precision(name: str) -> None:
    net, batch = FAMILY[name].make().to(torch.bfloat16), FAMILY[name].batch()
    exact = gr.gradients(model(name), batch, classes, WRT)
    rough = gr.gradients(net, batch, classes, WRT)
    assert all(value.isfinite().all() for value in rough.values())
    assert {value.dtype for value in rough.values()} <= {torch.bfloat16, torch.float32}  # some softmaxes are in float32
    for key, value in exact.items():
        weight = 1.0 if ":attention" not in key else (value != 0)
        similarity = F.cosine_similarity((rough[key].double() * weight).flatten(), (value * weight).flatten(), dim=0)
        assert similarity > 0.98, key
    parameters = gr.gradients(net, batch, some_loss, gr.Params("*"))
    assert all(value.isfinite().all() for value in parameters.values())


def test_train_mode_dropout() -> None:
    """Maps are those before dropout; the model's flags and random stream are its own."""
    net, batch = FAMILY["BERT, classifier"].make().train(), FAMILY["BERT, classifier"].batch()
    state = torch.get_rng_state()
    first, second = (gr.gradients(net, batch, classes, WRT) for _ in range(2))
    assert_all_near(first, second, 0.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in net.modules())
    plain = gr.gradients(model("BERT, classifier"), batch, classes, WRT)
    assert any(not torch.allclose(first[key], plain[key]) for key in plain)


@pytest.mark.parametrize("attention", [None, "eager"], ids=["default", "eager"])
def test_attentions_and_states_that_are_asked_for_as_well(attention: str | None) -> None:
    """A call that returns them gives the same; eager ones may be asked for in the configuration."""
    net, batch = FAMILY["BERT, classifier"].make(attention), FAMILY["BERT, classifier"].batch()
    plain = gr.gradients(net, batch, classes, WRT)
    if attention == "eager":
        net.config.output_attentions = net.config.output_hidden_states = True
    asked = gr.Batch({**batch.inputs, "output_attentions": True, "output_hidden_states": True})
    assert_all_near(gr.gradients(net, batch, classes, WRT), plain, 1e-13)
    assert_all_near(gr.gradients(net, asked, classes, WRT), plain, 1e-13)


def test_a_configuration_that_is_changed_after_the_first_look() -> None:
    net, batch = FAMILY["GPT-2"].make(), FAMILY["GPT-2"].batch()
    first = gr.gradients(net, batch, classes, gr.AttentionMaps())
    net.set_attn_implementation("eager")
    second = gr.gradients(net, batch, classes, gr.AttentionMaps())
    assert net.config._attn_implementation == "eager"
    net.set_attn_implementation("sdpa")
    third = gr.gradients(net, batch, classes, gr.AttentionMaps())
    assert net.config._attn_implementation == "sdpa"
    assert_all_near(second, first, 1e-12)
    assert_all_near(third, first, 1e-12)


def test_a_copy_of_a_model_is_looked_at_anew() -> None:
    net, batch = model("BERT, classifier"), FAMILY["BERT, classifier"].batch()
    expected = gr.gradients(net, batch, classes, WRT)
    copied = copy.deepcopy(net)
    copied.bert.encoder.layer = copied.bert.encoder.layer[:1]
    assert len(gr.gradients(copied, batch, classes, gr.AttentionMaps())) == 1
    assert_all_near(gr.gradients(copy.deepcopy(net), batch, classes, WRT), expected, 0.0)


class Pooled(nn.Module):
    """The user's own, around a model of transformers."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(16, 3).double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        pooled: Tensor = (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return self.head(pooled)


def test_inside_a_module_of_the_users_own() -> None:
    """Several embeddings lie inside; that which the model inside names is taken."""
    net, batch = Pooled(FAMILY["BERT, classifier"].make().bert), FAMILY["BERT, classifier"].batch()
    found = gr.gradients(net, batch, gr.all_logits(), WRT)
    assert next(iter(found)) == "encoder.embeddings.word_embeddings"
    assert len(found) == 3
    plan = gr.plan(net, batch, gr.all_logits(), gr.Params("*"), differentiable=True)
    assert plan.route == "vmap"
    loop = gr.gradients(net, batch, gr.all_logits(), gr.Params("*"), route="loop")
    assert_all_near(gr.gradients(net, batch, gr.all_logits(), gr.Params("*"), differentiable=True), loop, 1e-12)
    assert_all_near(gr.gradients(net, batch, gr.all_logits(), gr.Params("*")), loop, 1e-12)


@pytest.mark.parametrize("count", [2, 4])
def test_an_ensemble_of_models(count: int) -> None:
    members = [FAMILY["BERT, classifier"].make() for _ in range(count)]
    for i, member in enumerate(members):
        member.classifier.weight.data += 0.1 * i
    net = gr.Ensemble([Logits(member) for member in members])
    batch = FAMILY["BERT, classifier"].batch()
    found = gr.gradients(net, batch, gr.all_logits(), WRT)
    assert len(found) == 3 * count
    for i, member in enumerate(members):
        own = gr.gradients(member, batch, gr.all_logits(), WRT)
        mine = {key: found[f"models.{i}.inner.{key}"][:, i] for key in own}
        assert_all_near(mine, own, 1e-12)


class Logits(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Tensor:
        logits: Tensor = self.inner(**inputs).logits
        return logits


def test_a_picture_is_read_and_a_text_is_written() -> None:
    """Vision encoder and text decoder: the decoder's maps, self and cross, beside those of the encoder."""
    vision = transformers.ViTConfig(**{k: v for k, v in FAMILY["ViT"].settings.items() if k != "num_labels"})
    text = transformers.GPT2Config(**FAMILY["GPT-2"].settings, is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    net = transformers.VisionEncoderDecoderModel(config).double().eval()
    pictures = FAMILY["ViT"].batch().inputs["pixel_values"]
    batch = gr.Batch({"pixel_values": pictures, "decoder_input_ids": torch.randint(3, 40, (3, 4))})
    found = gr.gradients(net, batch, classes, WRT)
    maps = [key for key in found if ":attention" in key]
    assert len(maps) == 6
    assert {tuple(found[key].shape[3:]) for key in maps} == {(5, 5), (4, 4), (4, 5)}
    assert any("crossattention" in key for key in maps)
    tables = set(found) - set(maps)
    assert "decoder.transformer.wte" in tables
    eager = copy.deepcopy(net)
    eager.set_attn_implementation("eager")
    points, expected, _ = by_hand(eager, batch, ["decoder.transformer.wte"])
    assert_near(found["decoder.transformer.wte"], points["decoder.transformer.wte"], 1e-7)
    for shape in ((5, 5), (4, 4), (4, 5)):
        mine = [found[key] for key in maps if found[key].shape[3:] == shape]
        theirs = [value for value in expected if value.shape[3:] == shape]
        assert_all_near(dict(enumerate(mine)), dict(enumerate(theirs)), 1e-7)
    assert gr.gradients(net, batch, classes, gr.Inputs("pixel_values"))["pixel_values"].shape == (3, 6, 3, 8, 8)


def test_parts_of_the_model_are_frozen() -> None:
    net, batch = FAMILY["BERT, classifier"].make(), FAMILY["BERT, classifier"].batch()
    expected = gr.gradients(net, batch, classes, WRT)
    net.requires_grad_(False)
    net.classifier.requires_grad_(True)
    assert_all_near(gr.gradients(net, batch, classes, WRT), expected, 1e-14)
    for differentiable in (False, True):
        found = gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=differentiable)
        assert set(found) == {"classifier.weight", "classifier.bias"}


def test_without_gradients_around() -> None:
    net, batch = model("BERT, classifier"), FAMILY["BERT, classifier"].batch()
    expected = gr.gradients(net, batch, classes, WRT)
    for around in (torch.no_grad(), torch.inference_mode()):
        fresh = FAMILY["BERT, classifier"].make()
        with around:
            assert_all_near(gr.gradients(fresh, batch, classes, WRT), expected, 1e-14)
            assert_all_near(
                gr.gradients(fresh, batch, some_loss, gr.Params("*"), differentiable=True),
                gr.gradients(fresh, batch, some_loss, gr.Params("*")),
                1e-12,
            )


def test_an_input_that_the_model_does_not_know_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 3)

        def forward(self, input_ids: Tensor) -> Tensor:
            value: Tensor = self.table(input_ids).sum(1)
            return value

    with pytest.raises(BatchError, match="attention_mask"):
        gr.gradients(Bare(), FAMILY["GPT-2"].batch(), gr.logit(0), gr.Embeddings())


def test_a_model_without_embeddings_or_with_several() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Embedding(40, 3), nn.Embedding(40, 3)

        def forward(self, ids: Tensor) -> Tensor:
            value: Tensor = (self.one(ids) * self.two(ids)).sum(1)
            return value

    ids = torch.tensor([[1, 2], [3, 4]])
    with pytest.raises(gr.errors.UnknownNameError, match="several embeddings"):
        gr.gradients(Several(), ids, gr.logit(0), gr.Embeddings())
    assert list(gr.gradients(Several(), ids, gr.logit(0), gr.Embeddings("two"))) == ["two"]
    with pytest.raises(gr.errors.UnknownNameError, match=r"no nn\.Embedding"):
        gr.gradients(nn.Linear(3, 2), torch.zeros(2, 3), gr.logit(0), gr.Embeddings())


@pytest.fixture
def exotic() -> Any:
    """An attention function that is neither scaled_dot_product_attention nor a softmax, as packages of kernels have."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        scores = query @ key.transpose(-1, -2) * more["scaling"]
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, -1e9)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return ((weights / weights.sum(-1, keepdim=True)) @ value).transpose(1, 2).contiguous(), None

    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = (
        (ALL_ATTENTION_FUNCTIONS, attend),
        (ALL_MASK_ATTENTION_FUNCTIONS, partial(sdpa_mask, allow_is_causal_skip=False)),
    )
    for table, function in tables:
        type(table).register("exotic", function)
    yield "exotic"
    for table, _ in tables:
        type(table)._global_mapping.pop("exotic")


def test_attention_of_another_kind_is_made_eager_for_the_forward(exotic: str) -> None:
    """Embeddings keep the model's own; maps are seen where it writes its attention out."""
    net, batch = FAMILY["Llama"].make(), FAMILY["Llama"].batch()
    net.config._attn_implementation = exotic
    expected = gr.gradients(model("Llama", "eager"), batch, classes, WRT)
    assert "eager" in " ".join(gr.plan(net, batch, classes, gr.AttentionMaps()).notes)
    found = gr.gradients(net, batch, classes, WRT)
    assert_all_near(found, expected, 1e-6)
    assert net.config._attn_implementation == exotic
    whole = gr.gradients(net, batch, classes, gr.AttentionMaps(), differentiable=True)
    assert all(value.requires_grad for value in whole.values())


def test_attention_of_another_kind_whose_result_is_not_eagers_is_refused(exotic: str) -> None:
    """A mask that it would lose, for one."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping.pop(exotic)
    type(ALL_MASK_ATTENTION_FUNCTIONS).register(exotic, lambda *args, **kwargs: None)
    net = FAMILY["Llama"].make()
    net.config._attn_implementation = exotic
    with pytest.raises(CompatibilityError, match="would be wrong: outputs differ"):
        gr.gradients(net, FAMILY["Llama"].batch(), classes, gr.AttentionMaps())
