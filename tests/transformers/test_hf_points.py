"""Gradients of logits and probabilities at embeddings, hidden states and attention maps, against hooks and eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import open_session, point_values
from gradreg.regularizers import InputGradient
from tests.transformers.tiny import (
    FAMILY,
    MAIN,
    assert_all_near,
    assert_near,
    attentions,
    by_hand,
    classes,
    model,
    run,
    share,
)

transformers = pytest.importorskip("transformers")

HIDDEN = {
    "BERT, token classifier": ("bert.embeddings", "bert.encoder.layer.*"),
    "DistilBERT": ("distilbert.embeddings", "distilbert.transformer.layer.*"),
    "GPT-2": ("transformer.drop", "transformer.h.*", "transformer.ln_f"),
    "Llama": ("model.embed_tokens", "model.layers.*", "model.norm"),
    "T5": ("encoder.block.*", "encoder.final_layer_norm", "decoder.block.*", "decoder.final_layer_norm"),
    "BART": ("model.encoder.layers.*", "model.decoder.layers.*"),
    "RoBERTa": ("roberta.embeddings", "roberta.encoder.layer.*"),
    "ModernBERT": ("model.embeddings", "model.layers.*", "model.final_norm"),
    "ViT": (
        "vit.embeddings",
        "vit.encoder.layer.*" if transformers.__version__ < "5" else "vit.layers.*",
        "vit.layernorm",
    ),
}


def names_of(name: str, globs: tuple[str, ...]) -> list[str]:
    modules = [key for key, _ in model(name, "eager").named_modules() if key]
    return [found for glob in globs for found in gr.wrt.match_names(glob, modules, "module")]


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("attention", [None, "eager"], ids=["default", "eager"])
@pytest.mark.parametrize("name", MAIN)
def test_logits_and_probabilities_at_all_hidden_states_and_maps(name: str, attention: str | None, padded: bool) -> None:
    batch = FAMILY[name].batch(padded=padded)
    hidden = names_of(name, HIDDEN[name])
    points, maps, weights = by_hand(model(name, "eager"), batch, hidden)
    wrt = (*(gr.Activations(glob) for glob in HIDDEN[name]), gr.AttentionMaps())
    found = gr.gradients(model(name, attention), batch, classes, wrt)
    assert_all_near({key: found[key] for key in points}, points, share(name))
    keys = [key for key in found if ":attention" in key]
    assert len(keys) == len(maps) == FAMILY[name].maps
    assert len(found) == len(points) + len(maps)
    for key, expected, weight in zip(keys, maps, weights, strict=True):
        seen = weight.detach()[:, None] > 0  # what a masked key would do is not the same in all implementations
        assert_near(found[key] * seen, expected * seen, share(name), key)


@pytest.mark.parametrize("name", [name for name in FAMILY if FAMILY[name].maps])
def test_embeddings_and_maps_of_every_family(name: str) -> None:
    """The maps are those that eager attention returns; there are as many as layers, self and cross ones."""
    net, batch = model(name), FAMILY[name].batch()
    wrt = (gr.Embeddings(), gr.AttentionMaps())
    found = gr.gradients(net, batch, classes, wrt)
    keys = [key for key in found if ":attention" in key]
    tables = [key for key in found if key not in keys]
    assert len(keys) == FAMILY[name].maps
    points, maps, weights = by_hand(model(name, "eager"), batch, dict.fromkeys(key.partition("#")[0] for key in tables))
    assert_all_near({key: found[key] for key in tables}, points, share(name))
    for key, expected, weight in zip(keys, maps, weights, strict=True):
        seen = weight.detach()[:, None] > 0
        assert_near(found[key] * seen, expected * seen, share(name), key)


def test_cross_attention_is_named_apart() -> None:
    for name, parts in (("BART", ("encoder_attn", "self_attn")), ("T5", ("EncDecAttention", "SelfAttention"))):
        found = gr.gradients(model(name), FAMILY[name].batch(), classes, gr.AttentionMaps())
        cross = [key for key in found if parts[0] in key]
        assert len(cross) == 2
        assert all(value.shape[-2:] == (4, 7) for key, value in found.items() if key in cross)
        assert sum(value.shape[-2:] == (4, 4) for value in found.values()) == 2
        assert sum(value.shape[-2:] == (7, 7) for value in found.values()) == 2


@pytest.mark.parametrize("name", ["BERT, classifier", "GPT-2", "Llama", "T5", "DeBERTa-v2", "MPNet"])
def test_maps_are_values_too(name: str) -> None:
    """Put back what eager attention returned, and the outputs are the same; other maps give others."""
    net, batch = model(name), FAMILY[name].batch()
    keys = list(gr.gradients(net, batch, classes, gr.AttentionMaps()))
    with torch.no_grad():
        outputs = run(model(name, "eager"), batch, output_attentions=True)
    own = dict(zip(keys, attentions(outputs), strict=True))
    same = point_values(net, batch, classes, gr.AttentionMaps(), at=own, differentiable=False)
    assert_near(same, classes(outputs, batch), share(name))
    even = {key: torch.full_like(value, 1 / value.shape[-1]) for key, value in own.items()}
    assert not torch.allclose(
        point_values(net, batch, classes, gr.AttentionMaps(), at=even, differentiable=False), same
    )


def test_gradients_where_maps_are_replaced() -> None:
    """`at`: the gradient there, against a difference quotient."""
    net, batch = model("BERT, classifier"), FAMILY["BERT, classifier"].batch()
    wrt = gr.AttentionMaps(1)
    (key,) = gr.gradients(net, batch, classes, wrt)
    even = torch.full((3, 2, 7, 7), 1 / 7, dtype=torch.float64)
    found = gr.gradients(net, batch, classes, wrt, at={key: even})[key]
    step = torch.randn(even.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ahead, behind = (
        point_values(net, batch, classes, wrt, at={key: even + sign * 1e-5 * step}, differentiable=False)
        for sign in (1, -1)
    )
    assert_near((found * step[:, None]).flatten(2).sum(2), (ahead - behind) / 2e-5, 1e-7)


@pytest.mark.parametrize("wrt", [gr.Embeddings(), gr.AttentionMaps()], ids=["embeddings", "maps"])
@pytest.mark.parametrize("name", ["BERT, classifier", "T5", "Llama", "ALBERT", "DeBERTa-v2"])
def test_t18_directions_through_default_attention(name: str, wrt: Any) -> None:
    net, batch = model(name), FAMILY[name].batch()
    found = gr.gradients(model(name, "eager"), batch, classes, wrt)
    generator = torch.Generator().manual_seed(2)
    directions = {
        key: torch.randn(2, value.shape[0], *value.shape[2:], generator=generator, dtype=value.dtype)
        for key, value in found.items()
    }
    # a masked key's weight is zero in all implementations, its derivative is not: move what is seen
    if isinstance(wrt, gr.AttentionMaps):
        weights = attentions(run(model(name, "eager"), batch, output_attentions=True))
        directions = {
            key: value * (weight > 0) for (key, value), weight in zip(directions.items(), weights, strict=True)
        }
    expected = sum(
        (value[:, :, None] * directions[key].transpose(0, 1)[:, None]).flatten(3).sum(3) for key, value in found.items()
    )
    assert isinstance(expected, Tensor)
    assert_near(gr.directional(net, batch, classes, wrt, directions), expected, share(name))


@pytest.mark.parametrize("name", ["BERT, classifier", "GPT-2", "BART", "Llama"])
def test_t17_a_gradient_penalty_through_default_attention(name: str) -> None:
    """Double backward to all parameters from gradients at embeddings and maps, against eager attention by hand."""
    net, eager, batch = FAMILY[name].make(), model(name, "eager"), FAMILY[name].batch(padded=False)
    found = gr.gradients(net, batch, classes, (gr.Embeddings(), gr.AttentionMaps()), differentiable=True)
    mine = torch.autograd.grad(
        sum(value.square().sum() for value in found.values()),
        list(net.parameters()),
        allow_unused=True,
        materialize_grads=True,
    )
    table = dict.fromkeys(key.partition("#")[0] for key in found if ":attention" not in key)
    seen: list[Tensor] = []
    handles = [
        eager.get_submodule(key).register_forward_hook(lambda _, args, output: seen.append(output)) for key in table
    ]
    outputs = run(eager, batch, output_attentions=True)
    for handle in handles:
        handle.remove()
    tensors = [*seen, *attentions(outputs)]
    total = 0.0
    for k in range(6):
        row = torch.autograd.grad(classes(outputs, batch)[:, k].sum(), tensors, create_graph=True)
        total = total + sum(value.square().sum() for value in row)
    expected = torch.autograd.grad(total, list(eager.parameters()), allow_unused=True, materialize_grads=True)
    keys = [key for key, _ in eager.named_parameters()]
    assert_all_near(dict(zip(keys, mine, strict=True)), dict(zip(keys, expected, strict=True)), max(share(name), 1e-9))


def test_a_layer_that_is_shared_is_told_apart_by_calls() -> None:
    """ALBERT calls one layer twice."""
    found = gr.gradients(model("ALBERT"), FAMILY["ALBERT"].batch(), classes, gr.AttentionMaps())
    key = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention:attention"
    assert list(found) == [f"{key}#0", f"{key}#1"]
    _, maps, _ = by_hand(model("ALBERT", "eager"), FAMILY["ALBERT"].batch(padded=False), ())
    whole = gr.gradients(model("ALBERT"), FAMILY["ALBERT"].batch(padded=False), classes, gr.AttentionMaps())
    for value, expected in zip(whole.values(), maps, strict=True):
        assert_near(value, expected, 1e-10)


def test_which_layers() -> None:
    net, batch = model("BART"), FAMILY["BART"].batch()

    def keys(layers: Any) -> list[str]:
        return [
            key.removeprefix("model.").removesuffix(":attention")
            for key in gr.gradients(net, batch, classes, gr.AttentionMaps(layers))
        ]

    first = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"]
    assert sorted(keys(0)) == sorted(first)
    assert sorted(keys((0,))) == sorted(first)
    assert len(keys((0, 1))) == 6
    assert keys("**.encoder_attn") == ["decoder.layers.0.encoder_attn", "decoder.layers.1.encoder_attn"]
    assert keys("model.encoder.**") == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    for unknown in (2, (0, 7), ()):
        with pytest.raises(gr.errors.UnknownNameError, match="there is no attention in layer"):
            keys(unknown)
    with pytest.raises(gr.errors.UnknownNameError, match="No attention module matches"):
        keys("**.nothing")


def test_a_model_without_attention_says_so() -> None:
    with pytest.raises(gr.errors.CompatibilityError, match="computes no attention that can be seen"):
        gr.gradients(model("Mamba"), FAMILY["Mamba"].batch(), classes, gr.AttentionMaps())


def test_t24_maps_of_a_default_model_and_its_configuration() -> None:
    net, batch = FAMILY["GPT-2"].make(), FAMILY["GPT-2"].batch()
    before = net.config.to_dict(), net.config._attn_implementation
    found = gr.gradients(net, batch, classes, gr.AttentionMaps())
    assert (net.config.to_dict(), net.config._attn_implementation) == before
    assert [tuple(value.shape) for value in found.values()] == [(3, 6, 2, 7, 7)] * 2


def test_t25_probabilities_from_logits() -> None:
    """p_c (J_c - sum_k p_k J_k), at every point; they sum to zero over classes."""
    net, batch = model("BERT, classifier"), FAMILY["BERT, classifier"].batch()
    wrt = (gr.Embeddings(), gr.Activations("bert.encoder.layer.*"), gr.AttentionMaps())
    p = run(net, batch).logits.softmax(-1).detach()
    for value in gr.gradients(net, batch, classes, wrt).values():
        logits, probabilities = value.flatten(2)[:, :3], value.flatten(2)[:, 3:]
        assert_near(probabilities, p[..., None] * (logits - (p[..., None] * logits).sum(1, keepdim=True)), 1e-12)
        assert float(probabilities.sum(1).abs().max()) < 1e-12 * float(probabilities.abs().max())


def test_a_penalty_on_maps_in_a_training_objective() -> None:
    """The session's one forward shows the maps to the regularizer; the loss trains all parameters."""
    net, batch = FAMILY["GPT-2, classifier"].make(), FAMILY["GPT-2, classifier"].batch(left=True)
    of, wrt = gr.loss(F.cross_entropy), (gr.Embeddings(), gr.AttentionMaps())
    loss, log = gr.Objective(F.cross_entropy, maps=InputGradient(0.3, of=of, wrt=wrt))(net, batch)
    found = gr.gradients(net, batch, of, wrt)
    with open_session(net, batch, [(of, wrt)]):
        values = point_values(net, batch, of, wrt)  # from the shared forward, with the positions that it was given
    assert_near(values, point_values(net, batch, of, wrt, differentiable=False), 1e-12)
    assert_near(log["maps"], sum(value.flatten(1).square().sum(1) for value in found.values()).mean(), 1e-12)
    loss.backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.skipif(transformers.__version__ < "5", reason="runs in forward mode there")
def test_forward_mode_that_is_refused_is_told() -> None:
    """Mixtral's grouped product has none: the same sums from reverse mode, and a warning once."""
    net, batch = FAMILY["Mixtral"].make(), FAMILY["Mixtral"].batch()
    ((key, found),) = gr.gradients(net, batch, classes, gr.Embeddings()).items()
    direction = torch.randn(1, 3, 7, 16, generator=torch.Generator().manual_seed(0))
    expected = (found * direction[0][:, None]).flatten(2).sum(2, keepdim=True)
    assert not any("reverse mode" in note for note in gr.plan(net, batch, classes, gr.Embeddings()).notes)
    with pytest.warns(gr.errors.SlowRouteWarning, match="no forward mode"):
        assert_near(gr.directional(net, batch, classes, gr.Embeddings(), {key: direction}), expected, 1e-5)
    assert_near(gr.directional(net, batch, classes, gr.Embeddings(), {key: direction}), expected, 1e-5)
    assert any("reverse mode" in note for note in gr.plan(net, batch, classes, gr.Embeddings()).notes)


@pytest.mark.parametrize(("name", "how"), [("GPT-2", "calls of scaled_dot"), ("MPNet", "softmaxes that the model")])
def test_the_plan_says_how_maps_are_seen(name: str, how: str) -> None:
    notes = gr.plan(model(name), FAMILY[name].batch(), classes, gr.AttentionMaps()).notes
    assert any(note.startswith(f"attention maps: {how}") for note in notes)


def test_attention_that_shows_nothing_is_made_eager_for_the_forward() -> None:
    """A kernel of the user's own, without a call or a softmax that can be seen; the configuration is as before."""
    from transformers import AttentionInterface

    def hidden(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        scores = q @ k.transpose(-2, -1) * options.get("scaling", q.shape[-1] ** -0.5)
        weights = (scores if mask is None else scores + mask).exp()
        return (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("gradreg_hidden", hidden)
    name = "ViT"  # transformers 4 lets it have kernels of others, too
    net, batch = FAMILY[name].make(), FAMILY[name].batch(padded=False)
    net.set_attn_implementation("gradreg_hidden")
    assert net.config._attn_implementation == "gradreg_hidden"
    before = str(vars(net.config))
    found = gr.gradients(net, batch, classes, gr.AttentionMaps())
    assert str(vars(net.config)) == before
    _, expected, _ = by_hand(model(name, "eager"), batch, [])
    for value, right in zip(found.values(), expected, strict=True):
        assert_near(value, right, share(name))

    def failing(outputs: Any, batch: gr.Batch) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gr.gradients(net, batch, failing, gr.AttentionMaps())
    assert str(vars(net.config)) == before
    assert net.config._attn_implementation == "gradreg_hidden"
