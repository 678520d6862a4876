"""Models on which gradient code goes wrong, each with a small batch, a scalar and variables to differentiate by.

Everything is seeded and tiny, in float64 where the tags say nothing else, and smooth, so that second derivatives exist
and differ from zero. Loop over `CASES`, or pick by name with `case(name)`, or by tag with `cases_with(tag)`.

Tags:
    `heads`: a `SharedBase` or an `Ensemble`.
    `attention`: contains an attention kernel without a double backward of its own.
    `recurrent`: contains an RNN.
    `no_vmap`: torch.func.vmap over examples cannot run the model; per-example parameters need the loop.
    `random`: draws random numbers, so two forwards cannot be compared.
    `batch_statistics`: a BatchNorm in train mode, upstream of everything in `wrts`.
    `writes_buffers`: the forward changes a buffer.
    `float32`, `bfloat16`: the dtype.
    `large`: dear for the reference.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.errors import UnknownNameError, closest
from gradreg.model import Ensemble, SharedBase
from gradreg.scalars import (
    ScalarFunction,
    across_heads,
    all_logits,
    log_probability,
    logit,
    loss,
    margin,
    probability,
    token_loss,
    top_logit,
    true_logit,
)
from gradreg.testing import _models as models
from gradreg.wrt import Activations, Features, Inputs, Outputs, Params, Wrt

__all__ = ["CASES", "Case", "case", "cases_with"]


@dataclass(frozen=True)
class Case:
    """One model to test on.

    Args:
        name: How tests call it.
        make_model: Makes the model; the same parameters every time.
        make_batch: Makes the batch; the same values every time.
        of: The scalar to differentiate.
        wrts: With respect to what, by a short name.
        tags: What the case needs or lacks; see the module.

    Example:
        >>> from gradreg.testing import reference, zoo
        >>> case = zoo.case("tied_weights")
        >>> truth = reference.gradients(case.make_model(), case.make_batch(), case.of, case.wrts["params"])
        >>> sorted(truth)
        ['decoder.bias', 'encoder.weight']
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    of: ScalarFunction
    wrts: dict[str, Wrt | tuple[Wrt, ...]]
    tags: frozenset[str] = frozenset()


def case(name: str) -> Case:
    """Return the case of this name.

    Raises:
        UnknownNameError: If there is none.

    Example:
        >>> from gradreg.testing import zoo
        >>> zoo.case("reused_module").name
        'reused_module'
    """
    found = {item.name: item for item in CASES}
    if name not in found:
        raise UnknownNameError(f"The zoo has no case {name!r}; the closest are {closest(name, found)}.")
    return found[name]


def cases_with(tag: str) -> tuple[Case, ...]:
    """Return the cases that carry a tag.

    Example:
        >>> from gradreg.testing import zoo
        >>> all("heads" in item.tags for item in zoo.cases_with("heads"))
        True
    """
    return tuple(item for item in CASES if tag in item.tags)


def _seeded(make: Callable[[], nn.Module], dtype: torch.dtype, train: bool) -> Callable[[], nn.Module]:
    @functools.wraps(make)
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make().to(dtype).train(train)

    return build


class _Data:
    """Seeded tensors for a batch of n examples."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        self.n, self.dtype = n, dtype
        self.generator = torch.Generator().manual_seed(1)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.n, *shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, (self.n, *shape), generator=self.generator)


def _make(
    name: str,
    model: Callable[[], nn.Module],
    batch: Callable[[_Data], Batch],
    of: ScalarFunction,
    *,
    tags: str = "",
    n: int = 3,
    dtype: torch.dtype = torch.float64,
    train: bool = False,
    **wrts: Wrt | tuple[Wrt, ...],
) -> Case:
    return Case(
        name=name,
        make_model=_seeded(model, dtype, train),
        make_batch=lambda: batch(_Data(n, dtype)),
        of=of,
        wrts=wrts,
        tags=frozenset(tags.split()),
    )


def _vectors(width: int, classes: int = 2) -> Callable[[_Data], Batch]:
    """A batch of vectors with labels, groups and one extra."""

    def make(data: _Data) -> Batch:
        return Batch(
            data.normal(width),
            targets=data.integers(classes),
            groups=torch.arange(data.n) % 2 * 3,
            extras={"weight": data.normal().abs() + 0.5},
        )

    return make


def _mlp(*widths: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for left, right in itertools.pairwise(widths):
        layers += [nn.Linear(left, right), activation()]
    return nn.Sequential(*layers[:-1])


def _heads(count: int, head: Callable[[], nn.Module], base: Callable[[], nn.Module] | None = None) -> SharedBase:
    return SharedBase((base or (lambda: _mlp(3, 4, 4)))(), [head() for _ in range(count)])


def _small_head() -> nn.Module:
    return _mlp(4, 3, 2, activation=nn.Softplus)


def _weighted(outputs: Tensor, batch: Batch) -> Tensor:
    """A scalar that reads an extra and all classes."""
    return batch.extras["weight"] * (outputs.flatten(1) ** 2).sum(1)


def _disagreement(outputs: Tensor, batch: Batch) -> Tensor:
    """A scalar that mixes heads: the variance of their logits."""
    return outputs.var(1).sum(-1)


def _in_place_after_captured() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ELU(inplace=True), nn.Linear(4, 4), nn.SiLU(inplace=True), nn.Linear(4, 2))


def _in_place_head() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3), nn.Softplus(), nn.Linear(3, 2))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(2, 3)
    )


def _weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def _frozen_transformer() -> nn.Module:
    return models.Transformer(norm_first=False).requires_grad_(False)


def _unequal_heads() -> SharedBase:
    return SharedBase(_mlp(3, 4), [nn.Linear(4, 2), _small_head(), _mlp(4, 5, 2), _mlp(4, 3, 2, activation=nn.GELU)])


def _heads_of_equal_shape() -> SharedBase:
    """Heads whose parameters look alike but which are different functions."""
    first, second, third, fourth = (models.Scaled(factor) for factor in (0.5, 1.0, 2.0, 1.0))
    fourth.register_forward_hook(lambda module, args, output: 2 * output)
    return SharedBase(
        _mlp(3, 4), [first, second, third, fourth, _scaled_by_activation(1.0), _scaled_by_activation(3.0)]
    )


def _scaled_by_activation(beta: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Softplus(beta=beta), nn.Linear(3, 2))


def _tied_and_untied_heads() -> SharedBase:
    """Five heads of equal shapes; only the first one shares a weight between its layers."""
    heads = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(5)]
    heads[0][2].weight = heads[0][0].weight
    return SharedBase(_mlp(3, 4), heads)


def _partly_frozen_heads() -> SharedBase:
    """Frozen parameters in one head only, and a frozen base."""
    model = _heads(5, _small_head)
    model.base.requires_grad_(False)
    for parameter in model.heads[1].parameters():
        parameter.requires_grad_(False)
    return model


def _batch_norm_base() -> SharedBase:
    base = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
    return SharedBase(base, [_small_head() for _ in range(4)])


def _batch_norm_heads() -> SharedBase:
    def head() -> nn.Module:
        norm = nn.BatchNorm1d(3)
        nn.init.uniform_(norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
        return nn.Sequential(nn.Linear(4, 3), norm, nn.Tanh(), nn.Linear(3, 2))

    return SharedBase(_mlp(3, 4), [head() for _ in range(4)])


def _ensemble() -> Ensemble:
    return Ensemble([_mlp(3, 4, 2), nn.Linear(3, 2), models.Counting()])


_TOKENS = lambda data: Batch(data.normal(4, 4), data.integers(2))  # noqa: E731


def _token_ids(causal: bool) -> Callable[[_Data], Batch]:
    def make(data: _Data) -> Batch:
        ids = data.integers(7, 4)
        mask = torch.ones_like(ids)
        mask[0, 3] = 0
        labels = (ids if causal else data.integers(7, 4)).masked_fill(mask == 0, -100)
        return Batch({"input_ids": ids, "attention_mask": mask}, targets=labels)

    return make


def _dict_batch(data: _Data) -> Batch:
    return Batch({"a": data.normal(3), "b": data.normal(2), "ids": data.integers(3), "scale": 1.5})


_ALL = Params("*")
_EVERYWHERE: dict[str, Wrt | tuple[Wrt, ...]] = {
    "inputs": Inputs(),
    "activations": Activations("*"),
    "outputs": Outputs(),
    "params": _ALL,
}
_WITH_HEADS: dict[str, Wrt | tuple[Wrt, ...]] = {
    "inputs": Inputs(),
    "features": Features(),
    "outputs": Outputs(),
    "head_params": Params("heads.**"),
}

CASES: tuple[Case, ...] = (
    _make(
        "mlp",
        lambda: _mlp(3, 4, 2),
        _vectors(3),
        all_logits(),
        **_EVERYWHERE,
        several=(Inputs(), Activations("1"), Outputs(), Params("2.*")),
        some_params=(Params("0.weight"), Params("**.bias")),
    ),
    _make(
        "reused_module",
        models.Reused,
        _vectors(4),
        top_logit(),
        activations=Activations("*"),
        second_call=Activations("layer#1"),
        params=_ALL,
    ),
    _make("two_names", models.TwoNames, _vectors(4), logit(0), activations=Activations("*"), params=Params("second.*")),
    _make(
        "tied_weights",
        models.TiedWeights,
        _vectors(4),
        margin(),
        inputs=Inputs(),
        params=_ALL,
        one=Params("decoder.weight"),
    ),
    _make("unused_and_frozen", models.UnusedAndFrozen, _vectors(4), true_logit(), inputs=Inputs(), params=_ALL),
    _make(
        "dict_inputs",
        models.DictInputs,
        _dict_batch,
        log_probability(1),
        inputs=Inputs(),
        one=Inputs("b"),
        several=(Inputs("a"), Activations("right")),
        params=_ALL,
    ),
    _make(
        "mapping_input",
        models.MappingInput,
        lambda data: Batch({"a": data.normal(3), "b": data.normal(4)}),
        logit(2, output="score"),
        inputs=Inputs(),
        outputs=Outputs(),
        params=_ALL,
    ),
    _make(
        "tuple_inputs",
        models.TupleInputs,
        lambda data: Batch((data.normal(3), data.integers(5, 2))),
        probability(0, output=1),
        inputs=Inputs(),
        one=Inputs("0"),
        activations=Activations("embedding"),
        params=_ALL,
    ),
    _make(
        "dropout_eval",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2)),
        _vectors(3),
        logit(1),
        activations=Activations("*"),
        inputs=Inputs(),
        params=_ALL,
    ),
    _make(
        "dropout_train",
        lambda: nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5), nn.Tanh(), nn.Linear(40, 2)),
        _vectors(3),
        logit(1),
        tags="random",
        train=True,
        inputs=Inputs(),
        params=_ALL,
    ),
    _make("counting_buffer", models.Counting, _vectors(3), _weighted, tags="writes_buffers", train=True, **_EVERYWHERE),
    _make(
        "running_statistics",
        models.RunningStatistics,
        _vectors(3),
        logit(0),
        tags="writes_buffers no_vmap",
        train=True,
        inputs=Inputs(),
        params=_ALL,
    ),
    _make(
        "convolutions",
        _convolutions,
        lambda data: Batch(data.normal(2, 4, 4), data.integers(3)),
        loss(F.cross_entropy),
        inputs=Inputs(),
        activations=Activations("3"),
        params=_ALL,
    ),
    _make(
        "normalizations",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.GroupNorm(2, 4), nn.Linear(4, 2)),
        _vectors(3),
        loss(nn.CrossEntropyLoss(label_smoothing=0.1)),
        **_EVERYWHERE,
    ),
    _make(
        "batch_norm_eval",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
        _vectors(3),
        loss(F.cross_entropy),
        **_EVERYWHERE,
    ),
    _make(
        "in_place_after_captured",
        _in_place_after_captured,
        _vectors(3),
        logit(0),
        activations=Activations("*"),
        one=Activations("2"),
        params=_ALL,
    ),
    _make(
        "in_place_first",
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        _vectors(3),
        logit(0),
        inputs=Inputs(),
        params=_ALL,
    ),
    _make(
        "gru_tuple",
        models.TupleRecurrent,
        lambda data: Batch(data.normal(2, 3)),
        all_logits(),
        tags="recurrent no_vmap",
        inputs=Inputs(),
        activations=Activations("gru"),
        params=_ALL,
    ),
    _make(
        "time_major",
        models.TimeMajor,
        lambda data: Batch(data.normal(2, 3)),
        logit(0),
        tags="recurrent no_vmap",
        inputs=Inputs(),
        activations=Activations("gru", batch_axis=1),
    ),
    *(
        _make(
            f"transformer_norm_{'first' if norm_first else 'last'}",
            functools.partial(models.Transformer, norm_first),
            _TOKENS,
            loss(F.cross_entropy),
            tags="attention",
            inputs=Inputs(),
            activations=Activations("encoder.layers.*"),
            params=Params("encoder.layers.0.**"),
        )
        for norm_first in (False, True)
    ),
    _make(
        "frozen_transformer",
        _frozen_transformer,
        _TOKENS,
        logit(0),
        tags="attention",
        inputs=Inputs(),
        outputs=Outputs(),
    ),
    *(
        _make(
            f"attention_{'with' if weights else 'without'}_weights",
            functools.partial(models.Attention, weights),
            lambda data: Batch((data.normal(3, 4), torch.arange(3).expand(data.n, 3) > torch.arange(data.n)[:, None])),
            logit(2),
            tags="attention",
            inputs=Inputs(),
            activations=Activations("attention"),
            params=_ALL,
        )
        for weights in (False, True)
    ),
    _make("bare_attention", models.BareAttention, _TOKENS, logit(1), tags="attention", inputs=Inputs(), params=_ALL),
    _make("weight_norm", _weight_norm, _vectors(3), logit(1), inputs=Inputs(), params=_ALL),
    _make("residual_reused_norm", models.Residual, _vectors(4), logit(1), **_EVERYWHERE),
    _make("bare_parameters", models.BareParameters, _vectors(3), all_logits(), inputs=Inputs(), params=_ALL),
    _make("branching", models.Branching, _vectors(3), logit(1), tags="no_vmap", inputs=Inputs(), params=_ALL),
    _make("checkpointed", models.Checkpointed, _vectors(3), logit(1), tags="no_vmap", inputs=Inputs(), params=_ALL),
    _make("old_function", models.OldFunction, _vectors(3), logit(1), tags="no_vmap", inputs=Inputs(), params=_ALL),
    _make(
        "token_ids",
        lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=0), models.MeanOverTokens(), _mlp(4, 3, 2)),
        lambda data: Batch(data.integers(7, 5)),
        logit(1),
        activations=Activations("0"),
        params=_ALL,
    ),
    _make(
        "causal_language_model",
        models.FakeForCausalLM,
        _token_ids(causal=True),
        loss(F.cross_entropy),
        outputs=Outputs(),
        activations=Activations("embedding"),
        params=_ALL,
    ),
    _make(
        "token_classifier",
        models.FakeForTokenClassification,
        _token_ids(causal=False),
        token_loss(F.cross_entropy),
        activations=Activations("mix"),
        outputs=Outputs(),
        params=_ALL,
    ),
    _make(
        "token_outputs",
        lambda: _mlp(4, 3, 2),
        lambda data: Batch(data.normal(3, 4), data.integers(2, 3)),
        logit(1),
        **_EVERYWHERE,
    ),
    _make(
        "regression",
        lambda: models.Flat(3),
        lambda data: Batch(data.normal(3), data.normal()),
        loss(F.mse_loss),
        **_EVERYWHERE,
    ),
    _make("single_example", lambda: _mlp(3, 4, 2), _vectors(3), all_logits(), n=1, **_EVERYWHERE),
    _make(
        "float32", lambda: _mlp(3, 4, 2), _vectors(3), all_logits(), tags="float32", dtype=torch.float32, **_EVERYWHERE
    ),
    _make(
        "bfloat16",
        lambda: _mlp(3, 4, 2),
        _vectors(3),
        all_logits(),
        tags="bfloat16",
        dtype=torch.bfloat16,
        **_EVERYWHERE,
    ),
    _make(
        "two_heads",
        lambda: _heads(2, _small_head),
        _vectors(3),
        top_logit(centered=True),
        tags="heads",
        **_WITH_HEADS,
        params=_ALL,
        activations=Activations("**"),
        several=(Inputs(), Features(), Params("base.0.*")),
    ),
    _make("one_head", lambda: _heads(1, _small_head), _vectors(3), all_logits(), tags="heads", **_WITH_HEADS),
    _make(
        "five_heads",
        lambda: _heads(5, _small_head),
        _vectors(3),
        loss(F.cross_entropy),
        tags="heads",
        **_WITH_HEADS,
        params=_ALL,
        activations=Activations("**"),
        base_activations=Activations("base.*"),
        several=(Inputs(), Features(), Outputs(), Params("base.0.*")),
    ),
    _make(
        "many_heads", lambda: _heads(64, _small_head), _vectors(3), top_logit(), tags="heads large", n=2, **_WITH_HEADS
    ),
    _make("unequal_heads", _unequal_heads, _vectors(3), all_logits(), tags="heads", **_WITH_HEADS),
    _make("heads_of_equal_shape", _heads_of_equal_shape, _vectors(3), logit(0), tags="heads", **_WITH_HEADS),
    _make("tied_and_untied_heads", _tied_and_untied_heads, _vectors(3), logit(0), tags="heads", **_WITH_HEADS),
    _make("partly_frozen_heads", _partly_frozen_heads, _vectors(3), logit(0), tags="heads", **_WITH_HEADS),
    *(
        _make(
            name,
            functools.partial(_heads, count, nn.Identity),
            _vectors(3, 4),
            loss(F.cross_entropy),
            tags="heads",
            inputs=Inputs(),
            features=Features(),
            outputs=Outputs(),
            params=_ALL,
            base_activations=Activations("base.*"),
        )
        for name, count in (("two_identity_heads", 2), ("four_identity_heads", 4))
    ),
    _make(
        "normalized_heads",
        lambda: _heads(4, lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))),
        _vectors(3),
        logit(0),
        tags="heads",
        **_WITH_HEADS,
    ),
    _make(
        "one_logit_heads",
        lambda: _heads(4, lambda: _mlp(4, 3, 1)),
        _vectors(3),
        logit(0),
        tags="heads",
        **_WITH_HEADS,
    ),
    _make(
        "heads_without_class_axis",
        lambda: _heads(4, lambda: models.Flat(4)),
        _vectors(3),
        all_logits(),
        tags="heads",
        **_WITH_HEADS,
    ),
    _make(
        "in_place_heads",
        lambda: _heads(4, _in_place_head, lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh())),
        _vectors(3),
        top_logit(),
        tags="heads",
        **_WITH_HEADS,
    ),
    _make(
        "two_in_place_heads",
        lambda: _heads(2, _in_place_head, lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh())),
        _vectors(3),
        top_logit(),
        tags="heads",
        **_WITH_HEADS,
    ),
    _make(
        "mixed_heads",
        lambda: _heads(4, _small_head),
        _vectors(3),
        across_heads(_disagreement),
        tags="heads",
        **_WITH_HEADS,
        params=_ALL,
    ),
    _make(
        "batch_norm_train_base",
        _batch_norm_base,
        _vectors(3),
        logit(0),
        tags="heads batch_statistics writes_buffers",
        train=True,
        features=Features(),
        outputs=Outputs(),
        head_params=Params("heads.**"),
        activations=Activations("heads.*.0"),
    ),
    _make("batch_norm_eval_heads", _batch_norm_heads, _vectors(3), logit(0), tags="heads", **_WITH_HEADS),
    _make(
        "lstm_base",
        lambda: SharedBase(
            nn.LSTM(3, 4, batch_first=True), [_small_head() for _ in range(4)], select=lambda output: output[1][0][-1]
        ),
        lambda data: Batch(data.normal(2, 3), data.integers(2)),
        logit(0),
        tags="heads recurrent no_vmap",
        **_WITH_HEADS,
    ),
    _make(
        "token_heads",
        lambda: SharedBase(models.MappingInput(), [_mlp(3, 2) for _ in range(4)], select="score"),
        lambda data: Batch({"a": data.normal(3), "b": data.normal(4)}),
        all_logits(),
        tags="heads",
        **_WITH_HEADS,
    ),
    _make(
        "ensemble",
        _ensemble,
        _vectors(3),
        true_logit(),
        tags="heads writes_buffers",
        train=True,
        inputs=Inputs(),
        outputs=Outputs(),
        params=_ALL,
        activations=Activations("models.*.0"),
    ),
    _make(
        "ensemble_of_equals",
        lambda: Ensemble([models.DictInputs() for _ in range(5)]),
        _dict_batch,
        logit(0),
        tags="heads",
        inputs=Inputs(),
        one=Inputs("b"),
        outputs=Outputs(),
        params=_ALL,
    ),
)
