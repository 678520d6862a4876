"""Per-example gradients of all parameters of models of transformers, by every route, are those of a loop."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import _vmapped, collect_factors
from gradreg.errors import CompatibilityError, GradregWarning, SlowRouteWarning
from tests.transformers.tiny import FAMILY, assert_all_near, assert_near, looped, model, share, some_loss

transformers = pytest.importorskip("transformers")

OLD = transformers.__version__.startswith("4.")
LOOPED = {"BART, classifier", "T5, classifier", "Mamba"} | ({"OPT", "Mixtral"} if OLD else set())
"""Families that vmap refuses: they search for the end token, write in place, or route by values."""


@pytest.mark.parametrize("name", FAMILY)
def test_factors_serve_every_parameter(name: str) -> None:
    net, batch = model(name), FAMILY[name].batch()
    expected = looped(net, batch)
    factors = collect_factors(net, batch, some_loss, gr.Params("*"))
    assert {row.rule for row in factors.coverage}.isdisjoint({None, "gradients"})
    found = {key: factors.gradient(key).reshape(value.shape) for key, value in expected.items()}
    assert_all_near(found, expected, share(name))
    assert gr.plan(net, batch, some_loss, gr.Params("*")).route == "factors"


@pytest.mark.parametrize("name", FAMILY)
def test_differentiable_gradients(name: str) -> None:
    net, batch = FAMILY[name].make(), FAMILY[name].batch()
    plan = gr.plan(net, batch, some_loss, gr.Params("*"), differentiable=True)
    assert plan.route == ("loop" if name in LOOPED else "vmap")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowRouteWarning)
        found = gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True)
    assert_all_near(found, looped(net, batch), share(name))
    assert any(value.requires_grad for value in found.values())


@pytest.mark.parametrize("name", sorted(LOOPED & {"BART, classifier", "Mamba"}))
def test_the_plan_says_why_vmap_is_refused_and_a_warning_once(name: str) -> None:
    net, batch = FAMILY[name].make(), FAMILY[name].batch()
    with pytest.warns(SlowRouteWarning, match="does not run under torch.func.vmap"):
        gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True)
    gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True)  # no second one: warnings are errors
    reason = gr.plan(net, batch, some_loss, gr.Params("*"), differentiable=True).rejected["vmap"]
    words = "a shape inside it depends on values" if name.startswith("BART") else "without the axis of examples"
    assert words in reason
    with pytest.raises(gr.errors.RouteError, match=words):
        gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True, route="vmap")


@pytest.mark.parametrize("name", ["BERT, classifier", "GPT-2", "T5, token classifier", "Llama, classifier"])
def test_second_derivatives(name: str) -> None:
    """The gradient of the sum of squared norms of per-example gradients."""
    net, batch = FAMILY[name].make(), FAMILY[name].batch()
    parameters = list(net.parameters())
    found = gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True)
    total = sum(value.square().sum() for value in found.values())
    mine = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    eager, expected = FAMILY[name].make("eager"), None
    own = list(eager.parameters())
    for i in range(len(batch)):
        one = batch[i : i + 1]
        value = some_loss(eager(**one.inputs), one)[0]
        row = torch.autograd.grad(value, own, create_graph=True, allow_unused=True, materialize_grads=True)
        norm = sum(gradient.square().sum() for gradient in row)
        more = torch.autograd.grad(norm, own, allow_unused=True, materialize_grads=True)
        expected = more if expected is None else [a + b for a, b in zip(expected, more, strict=True)]
    names = [key for key, _ in net.named_parameters()]
    assert_all_near(dict(zip(names, mine, strict=True)), dict(zip(names, expected, strict=True)), share(name))


def test_left_and_right_padding_beside_each_other() -> None:
    """The batch of the user decides, not the first that was seen."""
    net = FAMILY["BERT, classifier"].make()
    for batch in (FAMILY["BERT, classifier"].batch(padded=False), FAMILY["BERT, classifier"].batch()):
        found = gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True)
        assert_all_near(found, looped(net, batch), 1e-10)


def test_the_route_without_a_mask_and_with_labels_of_its_own() -> None:
    """GPT-2 without a mask reads its token ids, to warn of padding (facts: E5)."""
    net, batch = FAMILY["GPT-2"].make(), FAMILY["GPT-2"].batch(padded=False)
    bare = gr.Batch({"input_ids": batch.inputs["input_ids"]})
    assert gr.plan(net, bare, some_loss, gr.Params("*"), differentiable=True).route == "vmap"
    assert_all_near(gr.gradients(net, bare, some_loss, gr.Params("*"), differentiable=True), looped(net, bare), 1e-10)


def test_dropout_in_train_mode() -> None:
    """Random numbers cannot be compared: the look is taken without dropout, which is then on."""
    net = FAMILY["BERT, classifier"].make().train()
    batch = FAMILY["BERT, classifier"].batch()
    assert gr.plan(net, batch, some_loss, gr.Params("*"), differentiable=True).route == "vmap"
    first, second = (
        gr.gradients(net, batch, some_loss, gr.Params("**.query.weight"), differentiable=True) for _ in range(2)
    )
    assert_all_near(first, second, 0.0)  # the random stream is put back
    plain = gr.gradients(net.eval(), batch, some_loss, gr.Params("**.query.weight"))
    assert any(not torch.allclose(first[key], plain[key]) for key in plain)


def test_vmap_is_not_trusted_where_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose branch for tracing computes something else: the comparison with the loop finds it."""
    net, batch = FAMILY["BERT, classifier"].make(), FAMILY["BERT, classifier"].batch()
    embed = type(net.bert.embeddings).forward

    def forward(self: nn.Module, *args: object, **kwargs: object) -> Tensor:
        value: Tensor = embed(self, *args, **kwargs)
        return 1.1 * value if transformers.modeling_utils.is_tracing(value) else value

    if OLD:
        monkeypatch.setattr(transformers.modeling_utils, "is_tracing", lambda *_: False, raising=False)
    monkeypatch.setattr(type(net.bert.embeddings), "forward", forward)
    with pytest.warns(SlowRouteWarning, match="differ from those of the loop"):
        found = gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True)
    assert_all_near(found, looped(net, batch), 1e-10)
    assert (
        "differ from those of the loop"
        in gr.plan(net, batch, some_loss, gr.Params("*"), differentiable=True).rejected["vmap"]
    )


def test_the_switch_is_put_back_also_after_a_fault() -> None:
    from gradreg.model import masks_in_full

    modules = [transformers.modeling_utils, transformers.masking_utils]
    names = ("is_tracing", "is_torchdynamo_compiling")
    before = [vars(module).get(name) for module in modules for name in names]
    assert any(before)

    def fault() -> None:
        with masks_in_full():
            assert [vars(module).get(name) for module in modules for name in names] != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fault()
    assert [vars(module).get(name) for module in modules for name in names] == before


def test_without_the_private_names_there_is_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradreg.model._masks_in_full._PREDICATES", ())
    net, batch = FAMILY["BERT, classifier"].make(), FAMILY["BERT, classifier"].batch()
    with pytest.warns(SlowRouteWarning, match="branches on values of tensors"):
        found = gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True)
    assert_all_near(found, looped(net, batch), 1e-10)


def test_a_comparison_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, batch = FAMILY["BERT, classifier"].make(), FAMILY["BERT, classifier"].batch()
    made: list[int] = []
    compare = _vmapped._compare
    monkeypatch.setattr(_vmapped, "_compare", lambda request: (made.append(1), compare(request))[1])
    for _ in range(3):
        gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True)
    assert len(made) == 1


# T19: one module object under two names, as T5 has them in transformers 4; T20: tied weights
class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.again = self.table
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.out(self.table(ids).tanh() + self.again(ids.flip(1))).sum(1)
        return logits


@pytest.mark.parametrize("differentiable", [False, True])
def test_t19_t20_one_module_under_two_names_with_a_tied_weight(differentiable: bool) -> None:
    net = TwoNames().double()
    weight, ids = net.table.weight, torch.tensor([[1, 2, 3], [4, 4, 0]])
    expected = []
    for row in ids:
        used = [weight.detach().clone().requires_grad_() for _ in range(3)]
        value = (used[0][row[None]].tanh() + used[1][row[None].flip(1)]) @ used[2].T
        expected.append(sum(torch.autograd.grad(value.sum(1)[0, 2], used)))
    for _ in range(2):
        found = gr.gradients(net, ids, gr.logit(2), gr.Params("*"), differentiable=differentiable)
        assert list(found) == ["table.weight"]
        assert_near(found["table.weight"], torch.stack(expected), 1e-12)
        assert net.table.weight is weight
        assert net.again is net.table
        assert net.out.weight is weight
        assert isinstance(weight, nn.Parameter)
    net(ids).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("name", ["T5", "GPT-2"])
def test_t19_t20_models_with_tied_weights_stay_whole(name: str) -> None:
    net, batch = FAMILY[name].make(), FAMILY[name].batch()
    before = {key: id(value) for key, value in net.named_parameters(remove_duplicate=False)}
    first = gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True)
    second = gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True)
    assert_all_near(second, first, 0.0)
    assert_all_near(first, looped(net, batch), share(name))
    after = dict(net.named_parameters(remove_duplicate=False))
    assert {key: id(value) for key, value in after.items()} == before
    assert all(isinstance(value, nn.Parameter) for value in after.values())
    some_loss(net(**batch.inputs), batch).sum().backward()
    assert all(value.grad is not None for value in net.parameters())


@pytest.mark.parametrize("differentiable", [False, True])
def test_t21_position_embeddings_are_looked_up_once_for_all(differentiable: bool) -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=32, vocab_size=20)
    net = transformers.GPT2LMHeadModel(config).double().eval()
    batch = gr.Batch({"input_ids": torch.randint(0, 20, (4, 9)), "attention_mask": torch.ones(4, 9, dtype=torch.long)})
    found = gr.gradients(net, batch, some_loss, gr.Params("transformer.wpe.weight"), differentiable=differentiable)
    assert found["transformer.wpe.weight"].shape == (4, 32, 32)
    assert_near(found["transformer.wpe.weight"], looped(net, batch)["transformer.wpe.weight"], 1e-10)


def test_t22_a_padded_batch_of_bert_under_vmap() -> None:
    net, batch = FAMILY["BERT, classifier"].make().float(), FAMILY["BERT, classifier"].batch(5)
    found = gr.gradients(net, batch, some_loss, gr.Params("*"), route="vmap")
    assert_all_near(found, looped(net, batch), 1e-6)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("name", ["BERT, classifier", "Llama"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(name: str, reentrant: bool) -> None:
    """They would be computed again in the backward, with other kernels and, for at, with other parameters."""
    settings = {**FAMILY[name].settings, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    family = replace(FAMILY[name], settings=settings)
    net, moved, batch = family.make().train(), family.make().train(), family.batch()
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    flags = [getattr(module, "gradient_checkpointing", None) for module in net.modules()]
    assert any(flags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradregWarning)
        for differentiable in (False, True):
            found = gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=differentiable)
            assert_all_near(found, looped(moved, batch), share(name))
        torch.autograd.grad(sum(value.square().sum() for value in found.values()), net.get_input_embeddings().weight)
    assert "not checkpointed" in " ".join(gr.plan(net, batch, some_loss, gr.Params("*")).notes)
    key = next(key for key, _ in net.named_parameters() if key.endswith(("query.weight", "q_proj.weight")))
    weight = moved.get_parameter(key)
    weight.data.mul_(1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradregWarning)
        placed = gr.gradients(net, batch, some_loss, gr.Params(key), at={key: weight.detach()})
    assert_near(placed[key], looped(moved, batch)[key], share(name))
    assert [getattr(module, "gradient_checkpointing", None) for module in net.modules()] == flags


def test_checkpointing_of_the_users_own_with_other_parameters_is_refused() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            value: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return value

    net, x = Checkpointed().double(), torch.randn(3, 3).double()
    assert gr.gradients(net, x, gr.logit(0), gr.Params("*"))
    at = {"inner.0.weight": torch.ones(4, 3).double()}
    with pytest.raises(CompatibilityError, match="checkpointed"):
        gr.gradients(net, x, gr.logit(0), gr.Params("inner.0.weight"), at=at)


def test_compiled_models_are_refused() -> None:
    """Whole or in place; before anything is compiled."""
    net, batch = FAMILY["BERT, classifier"].make(), FAMILY["BERT, classifier"].batch()
    net.compile(backend="eager")
    for compiled in (net, torch.compile(FAMILY["BERT, classifier"].make(), backend="eager")):
        with pytest.raises(CompatibilityError, match="compiled"):
            gr.gradients(compiled, batch, some_loss, gr.Params("*"), differentiable=True)
        with pytest.raises(CompatibilityError, match="compiled"):
            gr.gradients(compiled, batch, some_loss, gr.AttentionMaps())
