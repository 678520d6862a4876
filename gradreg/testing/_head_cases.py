"""The rows of the zoo with several heads: `SharedBase` and `Ensemble`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.model import Ensemble, SharedBase
from gradreg.scalars import (
    across_heads,
    all_logits,
    logit,
    loss,
    top_logit,
    true_logit,
)
from gradreg.testing import _models as models
from gradreg.testing._case import (
    ALL_PARAMS,
    Case,
    make_case,
    mlp,
    named_inputs,
    reconstruction,
    vectors,
)
from gradreg.wrt import Activations, Features, Inputs, Outputs, Params


def _heads(count: int, head: Callable[[], nn.Module], base: Callable[[], nn.Module] | None = None) -> SharedBase:
    return SharedBase((base or (lambda: mlp(3, 4, 4)))(), [head() for _ in range(count)])


def _small_head() -> nn.Module:
    return mlp(4, 3, 2, activation=nn.Softplus)


def _disagreement(outputs: Tensor, batch: Batch) -> Tensor:
    """A scalar that mixes heads: the variance of their logits."""
    return outputs.var(1).sum(-1)


def _in_place_head() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3), nn.Softplus(), nn.Linear(3, 2))


def _unequal_heads() -> SharedBase:
    return SharedBase(mlp(3, 4), [nn.Linear(4, 2), _small_head(), mlp(4, 5, 2), mlp(4, 3, 2, activation=nn.GELU)])


def _heads_of_equal_shape() -> SharedBase:
    """Heads whose parameters look alike but which are different functions."""
    first, second, third, fourth = (models.Scaled(factor) for factor in (0.5, 1.0, 2.0, 1.0))
    fourth.register_forward_hook(lambda module, args, output: 2 * output)
    return SharedBase(mlp(3, 4), [first, second, third, fourth, _scaled_by_activation(1.0), _scaled_by_activation(3.0)])


def _scaled_by_activation(beta: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Softplus(beta=beta), nn.Linear(3, 2))


def _tied_and_untied_heads() -> SharedBase:
    """Five heads of equal shapes; only the first one shares a weight between its layers."""
    heads = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(5)]
    heads[0][2].weight = heads[0][0].weight
    return SharedBase(mlp(3, 4), heads)


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
        nn.init.uniform_(norm.running_mean)  # type: ignore[arg-type]  # torch types it as optional
        nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]  # torch types it as optional
        return nn.Sequential(nn.Linear(4, 3), norm, nn.Tanh(), nn.Linear(3, 2))

    return SharedBase(mlp(3, 4), [head() for _ in range(4)])


def _ensemble() -> Ensemble:
    return Ensemble([mlp(3, 4, 2), nn.Linear(3, 2), models.Counting()])


def _autoencoders(count: int) -> Ensemble:
    return Ensemble([mlp(3, 2, 3) for _ in range(count)])


_WITH_HEADS: dict[str, Any] = {
    "inputs": Inputs(),
    "features": Features(),
    "outputs": Outputs(),
    "head_params": Params("heads.**"),
}


HEAD_CASES: tuple[Case, ...] = (
    *(
        make_case(
            f"{count}_decoders",
            "heads that reconstruct the inputs, which the scalar reads besides",
            functools.partial(_heads, count, lambda: mlp(4, 2, 3)),
            vectors(3),
            reconstruction,
            tags="heads",
            **_WITH_HEADS,
            base_activations=Activations("base.*"),
        )
        for count in (2, 4)
    ),
    *(
        make_case(
            f"{count}_autoencoders",
            "members that reconstruct the inputs, which the scalar reads besides",
            functools.partial(_autoencoders, count),
            vectors(3),
            reconstruction,
            tags="heads",
            inputs=Inputs(),
            outputs=Outputs(),
            params=ALL_PARAMS,
        )
        for count in (2, 4)
    ),
    make_case(
        "two_heads",
        "two heads, run one after the other",
        lambda: _heads(2, _small_head),
        vectors(3),
        top_logit(centered=True),
        tags="heads",
        **_WITH_HEADS,
        params=ALL_PARAMS,
        activations=Activations("**"),
        several=(Inputs(), Features(), Params("base.0.*")),
    ),
    make_case(
        "one_head",
        "a single head, which still has its axis",
        lambda: _heads(1, _small_head),
        vectors(3),
        all_logits(),
        tags="heads",
        **_WITH_HEADS,
    ),
    make_case(
        "five_heads",
        "enough heads to be run in one vmapped pass",
        lambda: _heads(5, _small_head),
        vectors(3),
        loss(F.cross_entropy),
        tags="heads",
        **_WITH_HEADS,
        params=ALL_PARAMS,
        activations=Activations("**"),
        base_activations=Activations("base.*"),
        several=(Inputs(), Features(), Outputs(), Params("base.0.*")),
    ),
    make_case(
        "many_heads",
        "64 heads",
        lambda: _heads(64, _small_head),
        vectors(3),
        top_logit(),
        tags="heads large",
        n=2,
        **_WITH_HEADS,
    ),
    make_case(
        "unequal_heads",
        "heads of different shapes, which cannot be stacked",
        _unequal_heads,
        vectors(3),
        all_logits(),
        tags="heads",
        **_WITH_HEADS,
    ),
    make_case(
        "heads_of_equal_shape",
        "heads of equal parameters that are different functions: a number, a hook, an activation",
        _heads_of_equal_shape,
        vectors(3),
        logit(0),
        tags="heads",
        **_WITH_HEADS,
    ),
    make_case(
        "tied_and_untied_heads",
        "a tie inside one head only",
        _tied_and_untied_heads,
        vectors(3),
        logit(0),
        tags="heads",
        **_WITH_HEADS,
    ),
    make_case(
        "partly_frozen_heads",
        "a frozen base, and frozen parameters in one head only",
        _partly_frozen_heads,
        vectors(3),
        logit(0),
        tags="heads",
        **_WITH_HEADS,
    ),
    *(
        make_case(
            name,
            "heads that do nothing, so that features and outputs are one tensor",
            functools.partial(_heads, count, nn.Identity),
            vectors(3, 4),
            loss(F.cross_entropy),
            tags="heads",
            inputs=Inputs(),
            features=Features(),
            outputs=Outputs(),
            params=ALL_PARAMS,
            base_activations=Activations("base.*"),
        )
        for name, count in (("two_identity_heads", 2), ("four_identity_heads", 4))
    ),
    make_case(
        "prelu_heads",
        "PReLU, which torch batches badly",
        lambda: _heads(4, lambda: nn.Sequential(nn.PReLU(), nn.Linear(4, 2)), lambda: mlp(3, 4, 4)),
        vectors(3),
        loss(F.cross_entropy),
        tags="heads",
        **_WITH_HEADS,
    ),
    make_case(
        "normalized_heads",
        "LayerNorm in heads, which torch differentiates wrongly under vmap",
        lambda: _heads(4, lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))),
        vectors(3),
        logit(0),
        tags="heads",
        **_WITH_HEADS,
    ),
    make_case(
        "one_logit_heads",
        "heads of one logit",
        lambda: _heads(4, lambda: mlp(4, 3, 1)),
        vectors(3),
        logit(0),
        tags="heads",
        **_WITH_HEADS,
    ),
    make_case(
        "heads_without_class_axis",
        "heads that give a number per example",
        lambda: _heads(4, lambda: models.Flat(4)),
        vectors(3),
        all_logits(),
        tags="heads",
        **_WITH_HEADS,
    ),
    make_case(
        "in_place_heads",
        "heads that overwrite the shared features, run in one pass",
        lambda: _heads(4, _in_place_head, lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh())),
        vectors(3),
        top_logit(),
        tags="heads",
        **_WITH_HEADS,
    ),
    make_case(
        "two_in_place_heads",
        "heads that overwrite the shared features, run one after the other",
        lambda: _heads(2, _in_place_head, lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh())),
        vectors(3),
        top_logit(),
        tags="heads",
        **_WITH_HEADS,
    ),
    make_case(
        "mixed_heads",
        "a scalar of all heads together",
        lambda: _heads(4, _small_head),
        vectors(3),
        across_heads(_disagreement),
        tags="heads",
        **_WITH_HEADS,
        params=ALL_PARAMS,
    ),
    make_case(
        "batch_norm_train_base",
        "BatchNorm in train mode before the features, which is allowed",
        _batch_norm_base,
        vectors(3),
        logit(0),
        tags="heads batch_statistics writes_buffers",
        train=True,
        features=Features(),
        outputs=Outputs(),
        head_params=Params("heads.**"),
        activations=Activations("heads.*.0"),
    ),
    make_case(
        "batch_norm_eval_heads",
        "running statistics of their own in every head",
        _batch_norm_heads,
        vectors(3),
        logit(0),
        tags="heads",
        **_WITH_HEADS,
    ),
    make_case(
        "lstm_base",
        "features selected from the tuple of an LSTM",
        lambda: SharedBase(
            nn.LSTM(3, 4, batch_first=True), [_small_head() for _ in range(4)], select=lambda output: output[1][0][-1]
        ),
        lambda data: Batch(data.normal(2, 3), data.integers(2)),
        logit(0),
        tags="heads recurrent no_vmap",
        **_WITH_HEADS,
    ),
    make_case(
        "token_heads",
        "a base with one mapping as its argument and features by name",
        lambda: SharedBase(models.MappingInput(), [mlp(3, 2) for _ in range(4)], select="score"),
        lambda data: Batch({"a": data.normal(3), "b": data.normal(4)}),
        all_logits(),
        tags="heads",
        **_WITH_HEADS,
    ),
    make_case(
        "ensemble",
        "members of different classes, one with a buffer",
        _ensemble,
        vectors(3),
        true_logit(),
        tags="heads writes_buffers",
        train=True,
        inputs=Inputs(),
        outputs=Outputs(),
        params=ALL_PARAMS,
        activations=Activations("models.*.0"),
    ),
    make_case(
        "ensemble_of_equals",
        "members with keyword inputs, run in one pass",
        lambda: Ensemble([models.DictInputs() for _ in range(5)]),
        named_inputs,
        logit(0),
        tags="heads",
        inputs=Inputs(),
        one=Inputs("b"),
        outputs=Outputs(),
        params=ALL_PARAMS,
    ),
)
