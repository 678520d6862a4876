"""Operations of torch 2.13 by how their second derivative behaves, each with a way to build it.

The classes were measured outside of this project on the CPU in float64 (245 operations, three random points each, directions
`<u, d<v, y>/dx>`), so they are an independent truth for the doctor:

    smooth     the second derivative is not zero
    partly     exactly zero in a region
    zero       a tensor of exact zeros
    none       None: the first derivative does not depend on the input
    detached   the first derivative is zero and has no graph
    raises     an error, in the first or in the second derivative
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

WRONG_THIRD = "wrong third order"


@dataclass(frozen=True)
class Operation:
    """One row.

    Attributes:
        kind: Its group.
        name: As it is called.
        second: The class of its second derivative.
        shape: The shape of the input that it gets.
        make: Returns the module, or the function of one tensor.
        tags: What else was measured: `wrong third order`.
    """

    kind: str
    name: str
    second: str
    shape: tuple[int, ...]
    make: Callable[[], Callable[[Tensor], Any]]
    tags: tuple[str, ...] = ()


class Function(nn.Module):
    """A function as a module, with modules that it uses."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts: Any = nn.ModuleList(parts) if parts else ()

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.parts)


ROWS: list[Operation] = []
FLAT, IMAGE, LINE, VOLUME, TOKENS = (3, 6), (2, 2, 6, 6), (2, 2, 8), (1, 2, 4, 4, 4), (2, 3, 4)


def row(kind: str, name: str, second: str, make: Callable[[], Any], shape: tuple[int, ...] = FLAT, *tags: str) -> None:
    ROWS.append(Operation(kind, name, second, shape, make, tags))


def of(function: Callable[..., Any], *parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Function(function, *(part() for part in parts))


# ------------------------------------------------------------------------------------------------------------- activations
for name, second in {
    "CELU": "partly",
    "ELU": "partly",
    "SELU": "partly",
    "GELU": "smooth",
    "GLU": "smooth",
    "Hardshrink": "zero",
    "Hardsigmoid": "raises",
    "Hardtanh": "zero",
    "LeakyReLU": "zero",
    "LogSigmoid": "smooth",
    "Mish": "smooth",
    "PReLU": "zero",
    "ReLU": "zero",
    "ReLU6": "zero",
    "RReLU": "zero",
    "Sigmoid": "smooth",
    "SiLU": "smooth",
    "Softplus": "smooth",
    "Softshrink": "zero",
    "Softsign": "smooth",
    "Tanh": "smooth",
    "Tanhshrink": "smooth",
}.items():
    row("activation", name, second, getattr(nn, name))
row("activation", "GELU(approximate='tanh')", "smooth", lambda: nn.GELU(approximate="tanh"))
row("activation", "Hardswish", "partly", of(lambda x, layer: layer(2 * x), nn.Hardswish))
row("activation", "LogSoftmax", "smooth", lambda: nn.LogSoftmax(-1))
row("activation", "Softmax", "smooth", lambda: nn.Softmax(-1))
row("activation", "Softmin", "smooth", lambda: nn.Softmin(-1))
row("activation", "Softmax2d", "smooth", nn.Softmax2d, IMAGE)
row("activation", "PReLU(num_parameters=6)", "zero", lambda: nn.PReLU(num_parameters=6))
row("activation", "ReLU(inplace=True)", "zero", lambda: nn.ReLU(inplace=True))
row("activation", "RReLU(eval)", "zero", lambda: nn.RReLU().eval())
row("activation", "Softplus(beta=1,threshold=1)", "partly", lambda: nn.Softplus(beta=1, threshold=1))
row("activation", "Softplus(beta=10)", "partly", lambda: nn.Softplus(beta=10))
row("activation", "Threshold", "zero", lambda: nn.Threshold(0.1, 0.0))


# --------------------------------------------------------------------------------------------------------------- attention
def attention(x: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, 0.5 * x.flip(-1), x.sin(), **options)


def with_kernel(kernel: SDPBackend, run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def inner(x: Tensor, *parts: nn.Module) -> Any:
        with sdpa_kernel(kernel):
            return run(x, *parts, **options)

    return inner


def mixed(x: Tensor, layer: nn.Module, need_weights: bool = False) -> Tensor:
    return layer(x, x, x, need_weights=need_weights)[0]


def applied(x: Tensor, layer: nn.Module) -> Any:
    return layer(x)


def decoded(x: Tensor, layer: nn.Module) -> Tensor:
    return layer(x, x.sin())


HEADED = (2, 2, 3, 4)  # batch, heads, tokens, width


def mha() -> nn.Module:
    return nn.MultiheadAttention(4, 2, batch_first=True)


def encoder(activation: str = "relu") -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, activation=activation, batch_first=True)


def decoder() -> nn.Module:
    return nn.TransformerDecoderLayer(4, 2, 5, dropout=0.0, batch_first=True)


def evaluated(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().eval()


MATH = SDPBackend.MATH
row("attention", "SDPA default", "raises", of(attention), HEADED)
row("attention", "SDPA default is_causal", "raises", of(lambda x: attention(x, is_causal=True)), HEADED)
row(
    "attention",
    "SDPA default + bool attn_mask",
    "raises",
    of(lambda x: attention(x, attn_mask=torch.ones(3, 3, dtype=torch.bool).tril())),
    HEADED,
)
row(
    "attention",
    "SDPA default + float mask requires_grad",
    "smooth",
    of(lambda x: attention(x, attn_mask=torch.zeros(3, 3, dtype=x.dtype, requires_grad=True))),
    HEADED,
)
row("attention", "SDPA default dropout_p=.3", "smooth", of(lambda x: attention(x, dropout_p=0.3)), HEADED)
for kernel in (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.OVERRIDEABLE,
):
    row("attention", f"SDPA {kernel.name}", "raises", of(with_kernel(kernel, attention)), HEADED)
row("attention", "SDPA MATH", "smooth", of(with_kernel(MATH, attention)), HEADED)
row("attention", "SDPA MATH is_causal", "smooth", of(with_kernel(MATH, attention, is_causal=True)), HEADED)
row("attention", "MultiheadAttention(need_weights=False) train", "raises", of(mixed, mha), TOKENS)
row("attention", "MultiheadAttention(need_weights=False) eval", "raises", evaluated(of(mixed, mha)), TOKENS)
row(
    "attention",
    "MultiheadAttention(need_weights=True) train",
    "smooth",
    of(lambda x, layer: mixed(x, layer, True), mha),
    TOKENS,
)
row(
    "attention",
    "MultiheadAttention(need_weights=False) + sdpa_kernel(MATH)",
    "smooth",
    of(with_kernel(MATH, mixed), mha),
    TOKENS,
)
row("attention", "TransformerEncoderLayer(relu) train", "raises", encoder, TOKENS)
row("attention", "TransformerEncoderLayer(relu) eval", "raises", evaluated(encoder), TOKENS)
row("attention", "TransformerEncoderLayer(gelu) train", "raises", lambda: encoder("gelu"), TOKENS)
row("attention", "TransformerDecoderLayer default", "raises", of(decoded, decoder), TOKENS)
for name, make in (
    ("TransformerEncoderLayer(relu) train + MATH", of(with_kernel(MATH, applied), encoder)),
    ("TransformerEncoderLayer(relu) eval + MATH", evaluated(of(with_kernel(MATH, applied), encoder))),
    ("TransformerDecoderLayer + MATH", of(with_kernel(MATH, decoded), decoder)),
):
    row("attention", name, "smooth", make, TOKENS, WRONG_THIRD)

# ----------------------------------------------------------------------------------------------- dropout, embedding, layers
row("dropout", "AlphaDropout(train)", "none", lambda: nn.AlphaDropout(0.3))
row("dropout", "Dropout(eval)", "none", lambda: nn.Dropout(0.3).eval())
row("dropout", "Dropout(train)", "none", lambda: nn.Dropout(0.3))
row("dropout", "Dropout1d(train)", "none", lambda: nn.Dropout1d(0.3), LINE)
row("dropout", "Dropout2d(train)", "none", lambda: nn.Dropout2d(0.3), IMAGE)
row("dropout", "FeatureAlphaDropout(train)", "none", lambda: nn.FeatureAlphaDropout(0.3), IMAGE)

IDS = torch.tensor([[0, 1, 2], [2, 1, 4]])
TABLE = (5, 4)
row("embedding", "F.embedding wrt weight", "none", of(lambda w: F.embedding(IDS, w)), TABLE)
row(
    "embedding",
    "F.embedding(max_norm=1) wrt weight",
    "none",
    of(lambda w: F.embedding(IDS, w * 1, max_norm=1.0)),
    TABLE,
)
row(
    "embedding",
    "F.embedding(max_norm=1) wrt weight (w*1)",
    "none",
    of(lambda w: F.embedding(IDS, w * 1, max_norm=1.0)),
    TABLE,
)
row(
    "embedding",
    "F.embedding(padding_idx=0) wrt weight",
    "none",
    of(lambda w: F.embedding(IDS, w, padding_idx=0)),
    TABLE,
)
row(
    "embedding",
    "F.embedding(scale_grad_by_freq) wrt weight",
    "none",
    of(lambda w: F.embedding(IDS, w, scale_grad_by_freq=True)),
    TABLE,
)
for mode in ("max", "mean", "sum"):
    row(
        "embedding",
        f"F.embedding_bag({mode}) wrt weight",
        "raises",
        of(lambda w, mode=mode: F.embedding_bag(IDS, w, mode=mode).sin()),
        TABLE,
    )
row(
    "embedding",
    "F.embedding_bag(sum) wrt per_sample_weights",
    "raises",
    of(lambda s: F.embedding_bag(IDS, torch.linspace(-1, 1, 20).view(5, 4).to(s), per_sample_weights=s).sin()),
    (2, 3),
)
row(
    "embedding",
    "F.embedding_bag(sum) wrt per_sample_weights, weight depends on them",
    "raises",
    of(lambda s: F.embedding_bag(IDS, torch.outer(s.flatten()[:5], s.flatten()[:4]), per_sample_weights=s, mode="sum")),
    (2, 3),
)
row(
    "embedding",
    "F.one_hot @ W (x@W)",
    "none",
    of(lambda w: F.one_hot(IDS, 5).to(w) @ w),
    TABLE,
)

row("layer", "Bilinear(x,x)", "smooth", of(lambda x, layer: layer(x, x), lambda: nn.Bilinear(6, 6, 4)))
row("layer", "Conv1d", "none", lambda: nn.Conv1d(2, 3, 3), LINE)
row("layer", "Conv2d", "none", lambda: nn.Conv2d(2, 3, 3), IMAGE)
row("layer", "Conv2d(groups=2,stride=2,dil=1)", "none", lambda: nn.Conv2d(2, 4, 3, stride=2, groups=2), IMAGE)
row(
    "layer",
    "Conv2d(padding_mode='circular')",
    "none",
    lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    IMAGE,
)
row(
    "layer",
    "Conv2d(padding_mode='reflect')",
    "zero",
    lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    IMAGE,
)
row("layer", "Conv3d", "none", lambda: nn.Conv3d(2, 3, 3), VOLUME)
row("layer", "ConvTranspose2d", "none", lambda: nn.ConvTranspose2d(2, 3, 3), IMAGE)
row("layer", "Linear", "none", lambda: nn.Linear(6, 4))

# -------------------------------------------------------------------------------------------------------------- functional
for name, second, function in (
    ("F.gumbel_softmax(hard)", "smooth", lambda x: F.gumbel_softmax(x, hard=True)),
    ("F.gumbel_softmax(soft)", "smooth", lambda x: F.gumbel_softmax(x)),
    ("F.normalize", "smooth", lambda x: F.normalize(x, dim=-1)),
    ("F.softmax", "smooth", lambda x: F.softmax(x, -1)),
    ("linalg.vector_norm(ord=1)", "zero", lambda x: torch.linalg.vector_norm(x, 1, dim=-1)),
    ("linalg.vector_norm(ord=inf)", "zero", lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1)),
    ("masked_fill(x>1, 0)", "none", lambda x: x.masked_fill(x > 1, 0)),
    ("scatter_add", "none", lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros(3, 6, dtype=torch.long), x)),
    ("straight-through (x.round()-x).detach()+x", "none", lambda x: (x.round() - x).detach() + x),
    ("torch.atan2(x, 0.7)", "smooth", lambda x: torch.atan2(x, torch.full_like(x, 0.7))),
    ("torch.diff", "none", lambda x: torch.diff(x)),
    ("torch.erf", "smooth", torch.erf),
    ("torch.exp", "smooth", torch.exp),
    ("torch.fft.rfft(x).abs()", "smooth", lambda x: torch.fft.rfft(x).abs()),
    ("torch.heaviside", "raises", lambda x: torch.heaviside(x, torch.zeros_like(x))),
    ("torch.lgamma(x*x+1)", "smooth", lambda x: torch.lgamma(x * x + 1)),
    ("torch.maximum(x,-x)", "none", lambda x: torch.maximum(x, -x)),
    ("torch.nan_to_num", "none", torch.nan_to_num),
    ("torch.relu", "zero", torch.relu),
    ("torch.sin", "smooth", torch.sin),
    ("torch.sinc", "smooth", torch.sinc),
    ("torch.special.i0", "smooth", torch.special.i0),
    ("torch.special.ndtri(sigmoid(x))", "smooth", lambda x: torch.special.ndtri(torch.sigmoid(x))),
    ("torch.where(x>0,x,0)", "none", lambda x: torch.where(x > 0, x, 0)),
    ("x.abs()", "zero", torch.abs),
    ("x.amax(-1)", "none", lambda x: x.amax(-1)),
    ("x.clamp(-1,1)", "none", lambda x: x.clamp(-1, 1)),
    ("x.cummax(-1).values", "none", lambda x: x.cummax(-1).values),
    ("x.cumprod(-1)", "smooth", lambda x: x.cumprod(-1)),
    ("x.cumsum(-1)", "none", lambda x: x.cumsum(-1)),
    ("x.floor()", "detached", torch.floor),
    ("x.fmod(2)", "none", lambda x: x.fmod(2)),
    ("x.gather", "none", lambda x: x.gather(1, torch.tensor([[0, 2], [1, 1], [5, 3]]))),
    ("x.index_select", "none", lambda x: x.index_select(1, torch.tensor([0, 2, 2]))),
    ("x.kthvalue(2)", "none", lambda x: x.kthvalue(2).values),
    ("x.logsumexp(-1)", "smooth", lambda x: x.logsumexp(-1)),
    ("x.max(-1).values", "none", lambda x: x.max(-1).values),
    ("x.median(-1).values", "none", lambda x: x.median(-1).values),
    ("x.min(-1).values", "none", lambda x: x.min(-1).values),
    ("x.norm(dim=-1)", "smooth", lambda x: x.norm(dim=-1)),
    ("x.prod(-1)", "smooth", lambda x: x.prod(-1)),
    ("x.remainder(2)", "none", lambda x: x.remainder(2)),
    ("x.round()", "detached", torch.round),
    ("x.sign()", "detached", torch.sign),
    ("x.sort(-1).values", "none", lambda x: x.sort(-1).values),
    ("x.std(-1)", "smooth", lambda x: x.std(-1)),
    ("x.topk(2).values", "none", lambda x: x.topk(2).values),
    ("x.var(-1)", "smooth", lambda x: x.var(-1)),
):
    row("functional", name, second, of(function))


# ------------------------------------------------------------------------------------------------------------------ linalg
def other(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, 18, dtype=x.dtype).view(3, 6).sin()


SQUARE = (2, 3, 3)
for name, second, function, shape in (
    ("cdist(p=1)", "raises", lambda x: torch.cdist(x, other(x), p=1), FLAT),
    ("cdist(p=2)", "raises", lambda x: torch.cdist(x, other(x)), FLAT),
    (
        "cdist(p=2,no mm)",
        "raises",
        lambda x: torch.cdist(x, other(x), compute_mode="donot_use_mm_for_euclid_dist"),
        FLAT,
    ),
    ("F.pdist", "raises", F.pdist, FLAT),
    ("linalg.cholesky", "smooth", lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(3, dtype=x.dtype)), SQUARE),
    ("linalg.det", "smooth", torch.linalg.det, SQUARE),
    ("linalg.eigvalsh", "smooth", lambda x: torch.linalg.eigvalsh(x + x.mT), SQUARE),
    ("linalg.inv", "smooth", torch.linalg.inv, SQUARE),
    ("linalg.norm(2)", "smooth", lambda x: torch.linalg.matrix_norm(x, 2), SQUARE),
    ("linalg.norm(nuc)", "smooth", lambda x: torch.linalg.matrix_norm(x, "nuc"), SQUARE),
    ("linalg.qr(R)", "smooth", lambda x: torch.linalg.qr(x).R, SQUARE),
    ("linalg.slogdet", "smooth", lambda x: torch.linalg.slogdet(x).logabsdet, SQUARE),
    ("linalg.solve", "smooth", lambda x: torch.linalg.solve(x, torch.ones(3, 1, dtype=x.dtype)), SQUARE),
    ("linalg.svd (S only)", "smooth", lambda x: torch.linalg.svd(x).S, SQUARE),
    ("linalg.svdvals", "smooth", torch.linalg.svdvals, SQUARE),
    ("matrix_exp", "smooth", lambda x: torch.matrix_exp(0.3 * x), SQUARE),
):
    row("linalg", name, second, of(function), shape)

# ------------------------------------------------------------------------------------------------------------------ losses
LABELS = torch.tensor([0, 2, 1])
SIGNS = torch.tensor([1.0, -1.0, 1.0])
BINARY = (torch.arange(18).view(3, 6) % 2).double()


def real(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, 18, dtype=x.dtype).view(3, 6).cos()


def triplet(x: Tensor) -> Tensor:
    return nn.TripletMarginLoss(margin=8.0)(x, real(x), -real(x))


def ctc(x: Tensor) -> Tensor:
    log_probabilities = x.log_softmax(-1).unsqueeze(1)
    return nn.CTCLoss()(log_probabilities, torch.tensor([[1, 2]]), torch.tensor([3]), torch.tensor([2]))


for name, second, function in (
    ("BCE(sigmoid)", "smooth", lambda x: nn.BCELoss()(x.sigmoid(), BINARY.to(x))),
    ("BCEWithLogits", "smooth", lambda x: nn.BCEWithLogitsLoss()(x, BINARY.to(x))),
    ("CosineEmbedding", "smooth", lambda x: nn.CosineEmbeddingLoss(margin=-0.9)(x, real(x), SIGNS.to(x))),
    ("CrossEntropy", "smooth", lambda x: nn.CrossEntropyLoss()(x, LABELS)),
    ("CrossEntropy(label_smoothing)", "smooth", lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x, LABELS)),
    ("CrossEntropy(prob targets)", "smooth", lambda x: nn.CrossEntropyLoss()(x, real(x).softmax(-1))),
    ("CTCLoss (native CPU)", "raises", ctc),
    (
        "F.linear_cross_entropy",
        "smooth",
        lambda x: F.linear_cross_entropy(x, torch.linspace(-1, 1, 24, dtype=x.dtype).view(4, 6), LABELS),
    ),
    ("GaussianNLL", "smooth", lambda x: nn.GaussianNLLLoss()(x, real(x), torch.ones_like(x))),
    ("HingeEmbedding", "none", lambda x: nn.HingeEmbeddingLoss()(x, 2 * BINARY.to(x) - 1)),
    ("Huber", "partly", lambda x: nn.HuberLoss()(x, real(x))),
    ("KLDiv", "smooth", lambda x: nn.KLDivLoss(reduction="batchmean")(x.log_softmax(-1), real(x).softmax(-1))),
    ("L1", "zero", lambda x: nn.L1Loss()(x, real(x))),
    ("MarginRanking", "none", lambda x: nn.MarginRankingLoss()(x, real(x), torch.ones_like(x))),
    ("MSE", "smooth", lambda x: nn.MSELoss()(x, real(x))),
    ("MultiLabelMargin", "raises", lambda x: nn.MultiLabelMarginLoss()(x, torch.tensor([[0, 2, -1, 0, 0, 0]] * 3))),
    ("MultiLabelSoftMargin", "smooth", lambda x: nn.MultiLabelSoftMarginLoss()(x, BINARY.to(x))),
    ("MultiMargin", "raises", lambda x: nn.MultiMarginLoss()(x, LABELS)),
    ("NLL (on given log-probabilities)", "zero", lambda x: nn.NLLLoss()(x, LABELS)),
    ("PoissonNLL", "smooth", lambda x: nn.PoissonNLLLoss()(x, real(x).abs())),
    ("SmoothL1", "partly", lambda x: nn.SmoothL1Loss()(x, real(x))),
    ("SoftMargin", "smooth", lambda x: nn.SoftMarginLoss()(x, 2 * BINARY.to(x) - 1)),
    ("TripletMargin", "smooth", triplet),
):
    row("loss", name, second, of(function))
row(
    "loss",
    "AdaptiveLogSoftmaxWithLoss",
    "smooth",
    of(lambda x, layer: layer(x, LABELS).loss, lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 8, [4])),
)

# --------------------------------------------------------------------------------------------------------- misc, norms, pads
row("misc", "CosineSimilarity(x,const)", "smooth", of(lambda x: nn.CosineSimilarity()(x, real(x))))
row("misc", "Flatten", "none", nn.Flatten, IMAGE)
row("misc", "Identity", "none", nn.Identity)
row("misc", "PairwiseDistance(x,const)", "smooth", of(lambda x: nn.PairwiseDistance()(x, real(x))))

row("norm", "BatchNorm1d(eval)", "none", lambda: nn.BatchNorm1d(6).eval())
row("norm", "BatchNorm1d(train)", "smooth", lambda: nn.BatchNorm1d(6), FLAT, WRONG_THIRD)
row(
    "norm",
    "BatchNorm1d(train,track_running_stats=False)",
    "smooth",
    lambda: nn.BatchNorm1d(6, track_running_stats=False),
    FLAT,
    WRONG_THIRD,
)
row("norm", "BatchNorm2d(eval)", "none", lambda: nn.BatchNorm2d(2).eval(), IMAGE)
row("norm", "BatchNorm2d(train)", "smooth", lambda: nn.BatchNorm2d(2), IMAGE, WRONG_THIRD)
row("norm", "GroupNorm", "smooth", lambda: nn.GroupNorm(2, 6))
row("norm", "InstanceNorm2d(affine)", "smooth", lambda: nn.InstanceNorm2d(2, affine=True), IMAGE, WRONG_THIRD)
row(
    "norm",
    "InstanceNorm2d(track,train)",
    "smooth",
    lambda: nn.InstanceNorm2d(2, track_running_stats=True),
    IMAGE,
    WRONG_THIRD,
)
row("norm", "LayerNorm", "smooth", lambda: nn.LayerNorm(6), FLAT, WRONG_THIRD)
row("norm", "LayerNorm(no affine)", "smooth", lambda: nn.LayerNorm(6, elementwise_affine=False), FLAT, WRONG_THIRD)
row("norm", "LocalResponseNorm", "smooth", lambda: nn.LocalResponseNorm(2, alpha=0.5), IMAGE)
row("norm", "RMSNorm", "smooth", lambda: nn.RMSNorm(6))

for name, second, shape, make in (
    ("CircularPad1d", "none", LINE, lambda: nn.CircularPad1d(2)),
    ("ConstantPad1d", "none", LINE, lambda: nn.ConstantPad1d(2, 0.5)),
    ("ReflectionPad1d", "zero", LINE, lambda: nn.ReflectionPad1d(2)),
    ("ReflectionPad2d", "zero", IMAGE, lambda: nn.ReflectionPad2d(2)),
    ("ReflectionPad3d", "zero", VOLUME, lambda: nn.ReflectionPad3d(2)),
    ("ReplicationPad1d", "zero", LINE, lambda: nn.ReplicationPad1d(2)),
    ("ReplicationPad2d", "zero", IMAGE, lambda: nn.ReplicationPad2d(2)),
    ("ReplicationPad3d", "zero", VOLUME, lambda: nn.ReplicationPad3d(2)),
    ("ZeroPad1d", "none", LINE, lambda: nn.ZeroPad1d(2)),
):
    row("pad", name, second, make, shape)


# ----------------------------------------------------------------------------------------------- parametrized, pools, resize
def linear() -> nn.Linear:
    return nn.Linear(6, 4)


row("param", "old utils.spectral_norm(Linear) train", "none", lambda: spectral_norm(linear()))
row("param", "old utils.weight_norm(Linear)", "none", lambda: weight_norm(linear()))
row("param", "parametrizations.orthogonal(Linear)", "none", lambda: parametrizations.orthogonal(linear()))
row(
    "param",
    "parametrizations.spectral_norm(Linear) eval",
    "none",
    lambda: parametrizations.spectral_norm(linear()).eval(),
)
row("param", "parametrizations.spectral_norm(Linear) train", "none", lambda: parametrizations.spectral_norm(linear()))
row("param", "parametrizations.weight_norm(Linear)", "none", lambda: parametrizations.weight_norm(linear()))


def unpooled(x: Tensor, pool: nn.Module, unpool: nn.Module) -> Tensor:
    return unpool(*pool(x))


for name, second, shape, make in (
    ("AdaptiveAvgPool1d", "zero", LINE, lambda: nn.AdaptiveAvgPool1d(3)),
    ("AdaptiveAvgPool2d", "zero", IMAGE, lambda: nn.AdaptiveAvgPool2d(3)),
    ("AdaptiveAvgPool3d", "zero", VOLUME, lambda: nn.AdaptiveAvgPool3d(3)),
    ("AdaptiveMaxPool1d", "zero", LINE, lambda: nn.AdaptiveMaxPool1d(3)),
    ("AdaptiveMaxPool2d", "zero", IMAGE, lambda: nn.AdaptiveMaxPool2d(3)),
    ("AdaptiveMaxPool3d", "zero", VOLUME, lambda: nn.AdaptiveMaxPool3d(3)),
    ("AvgPool1d", "zero", LINE, lambda: nn.AvgPool1d(2)),
    ("AvgPool2d", "zero", IMAGE, lambda: nn.AvgPool2d(2)),
    ("AvgPool3d", "zero", VOLUME, lambda: nn.AvgPool3d(2)),
    ("FractionalMaxPool2d", "zero", IMAGE, lambda: nn.FractionalMaxPool2d(2, output_size=3)),
    ("LPPool2d(p=2)", "smooth", IMAGE, lambda: nn.LPPool2d(2, 2)),
    ("LPPool2d(p=2), positive x", "smooth", IMAGE, of(lambda x, pool: pool(x.exp()), lambda: nn.LPPool2d(2, 2))),
    ("MaxPool1d", "zero", LINE, lambda: nn.MaxPool1d(2)),
    ("MaxPool2d", "zero", IMAGE, lambda: nn.MaxPool2d(2)),
    (
        "MaxPool2d->MaxUnpool2d",
        "zero",
        IMAGE,
        of(unpooled, lambda: nn.MaxPool2d(2, return_indices=True), lambda: nn.MaxUnpool2d(2)),
    ),
    ("MaxPool3d", "zero", VOLUME, lambda: nn.MaxPool3d(2)),
):
    row("pool", name, second, make, shape)


def grid(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.linspace(-0.9, 0.8, torch.Size(shape).numel(), dtype=x.dtype).sin().view(shape)


def sampled_input(mode: str) -> Callable[[Tensor], Tensor]:
    return lambda x: F.grid_sample(x, grid(x, (2, 3, 3, 2)), mode=mode, align_corners=False)


def sampled_at(mode: str) -> Callable[[Tensor], Tensor]:
    return lambda g: F.grid_sample(grid(g, (2, 2, 5, 5)), g.tanh(), mode=mode, align_corners=False)


def resized(mode: str, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, scale_factor=1.7, mode=mode, **options)


GRID = (2, 3, 3, 2)
for name, second, shape, function in (
    ("affine_grid", "none", (2, 2, 3), lambda t: F.affine_grid(t, [2, 2, 4, 4], align_corners=False)),
    ("Fold(Unfold)", "none", IMAGE, lambda x: F.fold(F.unfold(x, 3), (6, 6), 3)),
    (
        "grid_sample 3-D wrt grid",
        "smooth",
        (1, 2, 2, 2, 3),
        lambda g: F.grid_sample(grid(g, (1, 2, 4, 4, 4)), g.tanh(), align_corners=False),
    ),
    ("grid_sample(bicubic) wrt grid", "smooth", GRID, sampled_at("bicubic")),
    ("grid_sample(bicubic) wrt input", "none", IMAGE, sampled_input("bicubic")),
    ("grid_sample(bilinear) wrt grid", "smooth", GRID, sampled_at("bilinear")),
    ("grid_sample(bilinear) wrt input", "none", IMAGE, sampled_input("bilinear")),
    ("grid_sample(nearest) wrt grid", "zero", GRID, sampled_at("nearest")),
    ("grid_sample(nearest) wrt input", "none", IMAGE, sampled_input("nearest")),
    ("interpolate(area)", "zero", IMAGE, lambda x: F.interpolate(x, size=4, mode="area")),
    ("interpolate(bicubic)", "none", IMAGE, resized("bicubic")),
    (
        "interpolate(bicubic,antialias)",
        "none",
        IMAGE,
        lambda x: F.interpolate(x, size=4, mode="bicubic", antialias=True),
    ),
    ("interpolate(bilinear)", "none", IMAGE, resized("bilinear")),
    (
        "interpolate(bilinear,antialias)",
        "none",
        IMAGE,
        lambda x: F.interpolate(x, size=4, mode="bilinear", antialias=True),
    ),
    ("interpolate(linear) 3-D", "none", LINE, resized("linear")),
    ("interpolate(nearest)", "none", IMAGE, resized("nearest")),
    ("interpolate(nearest-exact)", "none", IMAGE, resized("nearest-exact")),
    ("interpolate(trilinear)", "none", VOLUME, resized("trilinear")),
):
    row("resize", name, second, of(function), shape)
row("resize", "PixelShuffle", "none", lambda: nn.PixelShuffle(2), (1, 4, 3, 3))

# --------------------------------------------------------------------------------------------------------------- recurrent
for name, second, shape, make in (
    ("GRU", "smooth", TOKENS, lambda: nn.GRU(4, 3, batch_first=True)),
    ("GRU(bidir)", "smooth", TOKENS, lambda: nn.GRU(4, 3, batch_first=True, bidirectional=True)),
    ("GRUCell", "smooth", FLAT, lambda: nn.GRUCell(6, 4)),
    ("LSTM", "smooth", TOKENS, lambda: nn.LSTM(4, 3, batch_first=True)),
    (
        "LSTM(2 layers,bidir,proj)",
        "smooth",
        TOKENS,
        lambda: nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True, proj_size=2),
    ),
    ("LSTMCell", "smooth", FLAT, lambda: nn.LSTMCell(6, 4)),
    ("RNN(relu)", "zero", TOKENS, lambda: nn.RNN(4, 3, batch_first=True, nonlinearity="relu")),
    ("RNN(tanh)", "smooth", TOKENS, lambda: nn.RNN(4, 3, batch_first=True)),
    ("RNNCell", "smooth", FLAT, lambda: nn.RNNCell(6, 4)),
):
    row("rnn", name, second, make, shape)

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in ROWS}
