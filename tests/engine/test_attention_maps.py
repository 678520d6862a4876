"""Attention weights of torch's own modules and of the user's, against attention that is written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import point_values
from gradreg.errors import CompatibilityError
from gradreg.model._attention import attention_weights
from gradreg.testing import compare

SDPA = F.scaled_dot_product_attention
Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _all_is_put_back() -> Any:
    yield
    assert F.scaled_dot_product_attention is SDPA


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same(found: Tensor | Weights, expected: Tensor | Weights) -> None:
    pair = [{"": each} if isinstance(each, Tensor) else each for each in (found, expected)]
    compare.assert_same(*pair)


def made(module: Callable[[], nn.Module]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return module().double().eval()


def several(outputs: Tensor, batch: gr.Batch) -> Tensor:
    """Two targets of an example."""
    return torch.stack([outputs.flatten(1).tanh().sum(1), outputs.flatten(1).square().sum(1)], 1)


def by_hand(
    module: nn.MultiheadAttention, query: Tensor, memory: Tensor, hidden: Tensor | None, weights: Weights, name: str
) -> Tensor:
    """Multi-head attention, batch first; the weights become leaves that the result is computed from."""
    n, length, width = query.shape
    heads = module.num_heads
    q, k, v = (
        F.linear(x, w, b).reshape(n, x.shape[1], heads, -1).transpose(1, 2)
        for x, w, b in zip(
            (query, memory, memory), module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True
        )
    )
    scores = q @ k.transpose(-2, -1) / math.sqrt(width // heads)
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None, None] if hidden.dim() == 2 else hidden, -math.inf)
    weights[name] = scores.softmax(-1)
    return module.out_proj((weights[name] @ v).transpose(1, 2).reshape(n, length, width))


def pulled(outputs: Tensor, weights: Weights, *, create_graph: bool = False) -> Weights:
    values = several(outputs, None)
    rows = [
        torch.autograd.grad(values[:, k].sum(), list(weights.values()), retain_graph=True, create_graph=create_graph)
        for k in range(2)
    ]
    return {f"{name}:attention": torch.stack(column, 1) for name, *column in zip(weights, *rows, strict=True)}


class Attending(nn.Module):
    def __init__(self, **call: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)
        self.call = call

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        mixed, weights = self.inner(x, x, x, key_padding_mask=hidden, **self.call)
        extra = 0 if weights is None else weights.flatten(1).square().sum(1)[:, None, None]
        return x + mixed + extra


HIDDEN = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


@pytest.mark.parametrize(
    "call", [{}, {"need_weights": True, "average_attn_weights": False}, {"need_weights": False}], ids=str
)
def test_t23_multihead_attention_with_and_without_returned_weights(call: dict[str, Any]) -> None:
    """Those that torch returns lie beside the path; these lie on it, and what is read of returned ones counts."""
    net, x = made(lambda: Attending(**call)), tensor(2, 5, 8)
    weights: Weights = {}
    mixed = by_hand(net.inner, x, x, HIDDEN, weights, "inner")
    if call.get("need_weights", True):
        read = weights["inner"] if call else weights["inner"].mean(1)
        mixed = mixed + read.flatten(1).square().sum(1)[:, None, None]
    batch = gr.Batch((x, HIDDEN))
    assert_same(net(x, HIDDEN), x + mixed)
    assert_same(gr.gradients(net, batch, several, gr.AttentionMaps()), pulled(x + mixed, weights))


def test_the_weights_that_torch_returns_are_off_the_path() -> None:
    net, x = made(lambda: nn.MultiheadAttention(8, 2, batch_first=True)), tensor(2, 5, 8)
    mixed, weights = net(x, x, x)
    assert torch.autograd.grad(mixed.sum(), weights, allow_unused=True) == (None,)


def test_an_unbatched_call_returns_weights_of_the_same_shape() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            rows = [self.inner(row, row, row) for row in x]
            assert all(weights.shape == (5, 5) for _, weights in rows)
            return torch.stack([mixed for mixed, _ in rows])

    found = gr.directional(made(Rows), tensor(2, 5, 8), several, gr.Inputs(), tensor(1, 2, 5, 8, seed=1))
    assert found.shape == (2, 2, 1)


def encoder_by_hand(net: nn.TransformerEncoder, x: Tensor, hidden: Tensor, weights: Weights) -> Tensor:
    for i, layer in enumerate(net.layers):
        x = layer.norm1(x + by_hand(layer.self_attn, x, x, hidden, weights, f"layers.{i}.self_attn"))
        x = layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))
    return x


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, activation=F.gelu)
    return nn.TransformerEncoder(layer, 2)


class Padded(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        value: Tensor = self.inner(x, src_key_padding_mask=hidden)
        return value * ~hidden[..., None]


def test_t17_transformer_encoder_with_a_key_padding_mask() -> None:
    """Gradients at the maps, and the gradient of their squares: a double backward."""
    net, x = Padded(made(encoder)), tensor(2, 5, 8)
    weights: Weights = {}
    outputs = encoder_by_hand(net.inner, x, HIDDEN, weights) * ~HIDDEN[..., None]
    expected = pulled(outputs, weights, create_graph=True)
    expected = {f"inner.{name}": value for name, value in expected.items()}
    found = gr.gradients(net, gr.Batch((x, HIDDEN)), several, gr.AttentionMaps(), differentiable=True)
    assert_same(found, expected)
    second = [
        torch.autograd.grad(sum(value.square().sum() for value in each.values()), list(net.parameters()))
        for each in (found, expected)
    ]
    for mine, theirs in zip(*second, strict=True):
        assert_same(mine, theirs)


def test_t18_directions_in_maps_of_a_transformer_encoder() -> None:
    net, batch = Padded(made(encoder)), gr.Batch((tensor(2, 5, 8), HIDDEN))
    found = gr.gradients(net, batch, several, gr.AttentionMaps())
    directions = {key: tensor(3, 2, 2, 5, 5, seed=i) for i, key in enumerate(found)}
    expected = sum(torch.einsum("ntabc,dnabc->ntd", value, directions[key]) for key, value in found.items())
    assert_same(gr.directional(net, batch, several, gr.AttentionMaps(), directions), expected)


def test_transformer_decoder_has_self_and_cross_attention() -> None:
    class Decoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerDecoderLayer(8, 2, 12, batch_first=True, dropout=0.3)
            self.inner = nn.TransformerDecoder(layer, 2)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.inner(x, memory, tgt_mask=causal, tgt_is_causal=True)

    net, x, memory = made(Decoding), tensor(2, 3, 8), tensor(2, 5, 8, seed=1)
    future, weights, y = torch.ones(3, 3, dtype=torch.bool).triu(1), {}, x
    for i, layer in enumerate(net.inner.layers):
        name = f"inner.layers.{i}"
        y = layer.norm1(y + by_hand(layer.self_attn, y, y, future[None, None], weights, f"{name}.self_attn"))
        y = layer.norm2(y + by_hand(layer.multihead_attn, y, memory, None, weights, f"{name}.multihead_attn"))
        y = layer.norm3(y + layer.linear2(layer.activation(layer.linear1(y))))
    found = gr.gradients(net, gr.Batch((x, memory)), several, gr.AttentionMaps())
    assert_same(found, pulled(y, weights))
    assert list(found)[1] == "inner.layers.0.multihead_attn:attention"
    assert_same(
        gr.gradients(net, gr.Batch((x, memory)), several, gr.AttentionMaps(1)),
        {key: value for key, value in found.items() if ".1." in key},
    )


class Own(nn.Module):
    """The user's own module, whose name says nothing."""

    def __init__(self, groups: int = 4, **settings: Any) -> None:
        super().__init__()
        self.projections = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 2 * groups), nn.Linear(8, 2 * groups)])
        self.settings = settings

    def qkv(self, x: Tensor) -> list[Tensor]:
        return [layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in self.projections]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        return F.scaled_dot_product_attention(q, k, v, **self.settings).transpose(1, 2).flatten(2)


ADDED = torch.tensor([[0.5, -1.0, -math.inf, 0.0, 2.0]], dtype=torch.float64).expand(5, 5)
BLIND = ~torch.eye(5, dtype=torch.bool) & (torch.arange(5) != 2)[:, None]  # row 2 sees nothing


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({}, 4),
        ({"attn_mask": ADDED > 0}, 4),
        ({"attn_mask": ADDED}, 4),
        ({"attn_mask": BLIND}, 4),
        ({"is_causal": True}, 4),
        ({"scale": 0.7}, 4),
        ({"enable_gqa": True}, 2),
        ({"enable_gqa": True, "is_causal": True, "scale": 2.0}, 1),
    ],
    ids=["plain", "boolean mask", "added mask", "blind row", "causal", "scale", "grouped", "grouped, causal, scale"],
)
def test_calls_of_the_users_own(settings: dict[str, Any], groups: int) -> None:
    net, x = made(lambda: Own(groups, **settings)), tensor(2, 5, 8)
    q, k, v = net.qkv(x)
    k, v = (each.repeat_interleave(4 // groups, 1) for each in (k, v))
    scores = q @ k.transpose(-2, -1) * settings.get("scale", 1 / math.sqrt(2))
    mask = settings.get("attn_mask")
    if settings.get("is_causal"):
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = {"": scores.softmax(-1).nan_to_num(0.0)}  # a blind row is zero
    outputs = (weights[""] @ v).transpose(1, 2).flatten(2)
    assert_same(net(x), outputs)
    found = gr.gradients(net, x, several, gr.AttentionMaps())
    assert_same(found, pulled(outputs, weights))
    assert all(value.isfinite().all() for value in found.values())
    second = gr.gradients(net, x, several, gr.AttentionMaps(), differentiable=True)
    assert torch.autograd.grad(second[":attention"].square().sum(), net.projections[2].weight)[0].isfinite().all()


def test_the_function_bound_at_import_is_seen_too() -> None:
    class Bound(Own):
        def forward(self, x: Tensor) -> Tensor:
            return SDPA(*self.qkv(x)).transpose(1, 2).flatten(2)

    bound, plain, x = made(Bound), made(Own), tensor(2, 5, 8)
    assert_same(
        gr.gradients(bound, x, several, gr.AttentionMaps()), gr.gradients(plain, x, several, gr.AttentionMaps())
    )


def test_dropout_comes_behind_the_weights() -> None:
    """In train mode weights are whole, and what is dropped of them has gradient zero."""
    net, x = made(lambda: Own(dropout_p=0.5)), tensor(2, 5, 8)
    found = gr.gradients(net, x, several, gr.AttentionMaps())[":attention"]
    dropped = (found == 0).double().mean()
    assert 0.2 < dropped < 0.8


def test_heads_and_ensembles_show_the_maps_of_every_head() -> None:
    """Four heads run as one vmapped pass, in which only the first is called by name."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mixed: Tensor = self.inner(x, x, x)[0]
            return mixed

    x = tensor(2, 5, 8)
    heads = [made(Head) for _ in range(4)]
    for i, head in enumerate(heads):
        head.inner.out_proj.bias.data.fill_(0.1 * i)
    for model, part in (
        (gr.SharedBase(made(Head), heads), "heads"),
        (gr.Ensemble(heads), "models"),
    ):
        found = gr.gradients(model, x, several, gr.AttentionMaps())
        base, given = {}, x
        if part == "heads":
            given = by_hand(model.base.inner, x, x, None, base, "base.inner")
        assert list(found) == [
            *(f"{name}:attention" for name in base),
            *(f"{part}.{i}.inner:attention" for i in range(4)),
        ]
        for i, head in enumerate(heads):
            weights: Weights = dict(base)
            output = by_hand(head.inner, given, given, None, weights, "own")
            own = pulled(output, weights)
            for name, value in own.items():
                key = name if name in found else f"{part}.{i}.inner:attention"
                assert found[key].shape == (2, 4, *value.shape[1:])
                assert_same(found[key][:, i], value)


def test_heads_that_run_in_one_vmapped_pass_show_all_their_maps() -> None:
    class Equal(Own):
        def __init__(self) -> None:
            super().__init__()
            del self.settings  # dictionaries are not known to be equal

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*self.qkv(x)).transpose(1, 2).flatten(2)

    x, heads = tensor(2, 5, 8), [made(Equal) for _ in range(4)]
    for i, head in enumerate(heads):
        head.projections[2].bias.data.fill_(0.1 * i)
    model = gr.Ensemble(heads)
    note = gr.plan(model, x, several, gr.Inputs()).notes[0]
    assert "vmapped" in note  # without maps
    found = gr.gradients(model, x, several, gr.AttentionMaps())
    assert list(found) == [f"models.{i}:attention" for i in range(4)]
    for i, head in enumerate(heads):
        own = gr.gradients(head, x, several, gr.AttentionMaps())[":attention"]
        assert_same(found[f"models.{i}:attention"][:, i], own)


CALLS = {"n": 0}


class Changing(nn.Module):
    """Attends once, and in every second forward twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Own()

    def forward(self, x: Tensor) -> Tensor:
        CALLS["n"] += 1
        y: Tensor = self.inner(x)
        return self.inner(y) if CALLS["n"] % 2 else y


class Larger(Changing):
    """Attends twice where there are more than two examples."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return self.inner(y) if len(x) > 2 else y


class Suspicious(nn.Module):
    """Computes something else where attention is intercepted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Own()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y if F.scaled_dot_product_attention is SDPA else 1.001 * y


class Faulty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Own()

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Changing, "two forwards make different attention calls"),
        (Larger, "computed attention 2 times in this forward and 1 times"),
        (Suspicious, "outputs differ by"),
    ],
)
def test_maps_that_could_be_wrong_are_refused(kind: type[nn.Module], words: str) -> None:
    net = made(kind)
    for _ in range(2):  # the verdict is remembered
        with pytest.raises(CompatibilityError, match=words):
            gr.gradients(net, tensor(4, 5, 8), several, gr.AttentionMaps())


def test_all_is_put_back_after_a_fault() -> None:
    net = made(Faulty)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules()]
    with pytest.raises(ZeroDivisionError):
        gr.gradients(net, tensor(4, 5, 8), several, gr.AttentionMaps())
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules()] == hooks
    assert not any(hooks)


def test_modules_that_are_exchanged_after_the_look_are_noticed() -> None:
    net = made(lambda: nn.Sequential(Own(), Own()))
    x = tensor(4, 5, 8)
    assert len(gr.gradients(net, x, several, gr.AttentionMaps())) == 2
    net[1] = nn.Sequential(made(Own), made(Own))
    with pytest.raises(CompatibilityError, match=r"was not called|computed attention"):
        gr.gradients(net, x, several, gr.AttentionMaps())


def test_checkpointed_attention_of_the_users_own_raises() -> None:
    """It would be computed again outside, by the fused kernel."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Own()

        def forward(self, x: Tensor) -> Tensor:
            value: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return value

    with pytest.raises((RuntimeError, CompatibilityError)):
        gr.gradients(made(Checkpointed), tensor(4, 5, 8), several, gr.AttentionMaps())


def test_values_at_maps_and_back() -> None:
    net, x = made(lambda: Attending(need_weights=False)), tensor(2, 5, 8)
    weights: Weights = {}
    mixed = by_hand(net.inner, x, x, HIDDEN, weights, "inner")
    batch, wrt = gr.Batch((x, HIDDEN)), gr.AttentionMaps()
    same = point_values(net, batch, several, wrt, at={"inner:attention": weights["inner"]}, differentiable=False)
    assert_same(same, several(x + mixed, batch))
    with pytest.raises(gr.errors.GradregError, match="has shape"):
        point_values(net, batch, several, wrt, at={"inner:attention": weights["inner"][:, :1]})
    # parameters where maps are replaced: those of queries and keys are passed by
    at = {"inner:attention": torch.full_like(weights["inner"], 0.2)}
    found = gr.gradients(net, batch, several, (wrt, gr.Params("inner.in_proj_weight")), at=at)
    assert not found["inner.in_proj_weight"][..., :16, :].any()
    assert found["inner.in_proj_weight"][..., 16:, :].any()


class SoftmaxAttention(nn.Module):
    """Writes its softmax out, beside others over four axes that are no attention over keys."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.reshape(len(x), -1, 2, 2).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        gates = v.softmax(1) * torch.softmax(v, dim=2)
        return ((q @ k.transpose(-2, -1)).softmax(-1) @ (v * gates)).transpose(1, 2).flatten(2)


def test_softmaxes_over_other_axes_are_no_maps() -> None:
    net, x = made(SoftmaxAttention), tensor(2, 3, 4)
    found = gr.gradients(net, x, several, gr.AttentionMaps())
    assert [(key, value.shape) for key, value in found.items()] == [(":attention", (2, 2, 2, 3, 3))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_are_not_rounded(dtype: torch.dtype) -> None:
    """As inside scaled_dot_product_attention: of scores around 100, half precision would lose whole units."""
    q, k = (tensor(1, 2, 5, 16, seed=seed).to(dtype) for seed in (0, 1))
    q[..., 0] = k[..., 0] = 20
    exact = (q.double() @ k.double().transpose(-2, -1) / 4).softmax(-1)
    found = attention_weights(q, k, None)
    assert found.dtype == dtype
    assert float((found.double() - exact).abs().max()) <= torch.finfo(dtype).eps
