"""The rows of the zoo without heads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.scalars import (
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
from gradreg.testing._case import (
    ALL_PARAMS,
    EVERYWHERE,
    Case,
    Data,
    make_case,
    mlp,
    named_inputs,
    reconstruction,
    vectors,
)
from gradreg.wrt import Activations, Inputs, Outputs, Params


def _weighted(outputs: Tensor, batch: Batch) -> Tensor:
    """A scalar that reads an extra and all classes."""
    weight: Tensor = batch.extras["weight"]
    return weight * (outputs.flatten(1) ** 2).sum(1)


def _in_place_after_captured() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ELU(inplace=True), nn.Linear(4, 4), nn.SiLU(inplace=True), nn.Linear(4, 2))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(2, 3)
    )


def _weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def _frozen_transformer() -> nn.Module:
    return models.Transformer(norm_first=False).requires_grad_(False)


def _sequences(data: Data) -> Batch:
    return Batch(data.normal(4, 4), data.integers(2))


def _token_ids(causal: bool) -> Callable[[Data], Batch]:
    def make(data: Data) -> Batch:
        ids = data.integers(7, 4)
        mask = torch.ones_like(ids)
        mask[0, 3] = 0
        labels = (ids if causal else data.integers(7, 4)).masked_fill(mask == 0, -100)
        return Batch({"input_ids": ids, "attention_mask": mask}, targets=labels)

    return make


PLAIN_CASES: tuple[Case, ...] = (
    make_case(
        "mlp",
        "plain layers: every kind of variable, alone and together",
        lambda: mlp(3, 4, 2),
        vectors(3),
        all_logits(),
        **EVERYWHERE,
        several=(Inputs(), Activations("1"), Outputs(), Params("2.*")),
        some_params=(Params("0.weight"), Params("**.bias")),
    ),
    make_case(
        "reused_module",
        "one module called three times; its calls are apart as activations and summed as parameters",
        models.Reused,
        vectors(4),
        top_logit(),
        activations=Activations("*"),
        second_call=Activations("layer#1"),
        params=ALL_PARAMS,
    ),
    make_case(
        "two_names",
        "one module under two names; torch's functional_call swaps it twice (pytorch/pytorch#164759)",
        models.TwoNames,
        vectors(4),
        logit(0),
        activations=Activations("*"),
        params=Params("second.*"),
    ),
    make_case(
        "tied_weights",
        "one parameter in two modules; its gradient is the sum of both",
        models.TiedWeights,
        vectors(4),
        margin(),
        inputs=Inputs(),
        params=ALL_PARAMS,
        one=Params("decoder.weight"),
    ),
    make_case(
        "unused_and_frozen",
        "parameters that are never used, do not matter, or are frozen",
        models.UnusedAndFrozen,
        vectors(4),
        true_logit(),
        inputs=Inputs(),
        params=ALL_PARAMS,
    ),
    make_case(
        "dict_inputs",
        "keyword inputs, one a constant, one of integers",
        models.DictInputs,
        named_inputs,
        log_probability(1),
        inputs=Inputs(),
        one=Inputs("b"),
        several=(Inputs("a"), Activations("right")),
        params=ALL_PARAMS,
    ),
    make_case(
        "mapping_input",
        "one mapping as the only argument, and outputs by name without logits",
        models.MappingInput,
        lambda data: Batch({"a": data.normal(3), "b": data.normal(4)}),
        logit(2, output="score"),
        inputs=Inputs(),
        outputs=Outputs(),
        params=ALL_PARAMS,
    ),
    make_case(
        "tuple_inputs",
        "positional inputs, one of integers, and a tuple of outputs",
        models.TupleInputs,
        lambda data: Batch((data.normal(3), data.integers(5, 2))),
        probability(0, output=1),
        inputs=Inputs(),
        one=Inputs("0"),
        activations=Activations("embedding"),
        params=ALL_PARAMS,
    ),
    make_case(
        "dropout_eval",
        "dropout that is off",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2)),
        vectors(3),
        logit(1),
        activations=Activations("*"),
        inputs=Inputs(),
        params=ALL_PARAMS,
    ),
    make_case(
        "dropout_train",
        "dropout that is on: one mask per example and forward",
        lambda: nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5), nn.Tanh(), nn.Linear(40, 2)),
        vectors(3),
        logit(1),
        tags="random",
        train=True,
        inputs=Inputs(),
        params=ALL_PARAMS,
    ),
    make_case(
        "counting_buffer",
        "a buffer that changes in the forward and then matters: a second forward would differ",
        models.Counting,
        vectors(3),
        _weighted,
        tags="writes_buffers",
        train=True,
        **EVERYWHERE,
    ),
    make_case(
        "running_statistics",
        "buffers written by assignment and in place, which vmap refuses",
        models.RunningStatistics,
        vectors(3),
        logit(0),
        tags="writes_buffers no_vmap",
        train=True,
        inputs=Inputs(),
        params=ALL_PARAMS,
    ),
    make_case(
        "convolutions",
        "images, pooling and flattening",
        _convolutions,
        lambda data: Batch(data.normal(2, 4, 4), data.integers(3)),
        loss(F.cross_entropy),
        inputs=Inputs(),
        activations=Activations("3"),
        params=ALL_PARAMS,
    ),
    make_case(
        "normalizations",
        "LayerNorm and GroupNorm",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.GroupNorm(2, 4), nn.Linear(4, 2)),
        vectors(3),
        loss(nn.CrossEntropyLoss(label_smoothing=0.1)),
        **EVERYWHERE,
    ),
    make_case(
        "batch_norm_eval",
        "BatchNorm with running statistics, which keeps examples apart",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
        vectors(3),
        loss(F.cross_entropy),
        **EVERYWHERE,
    ),
    make_case(
        "in_place_after_captured",
        "a captured activation that the next layer overwrites",
        _in_place_after_captured,
        vectors(3),
        logit(0),
        activations=Activations("*"),
        one=Activations("2"),
        params=ALL_PARAMS,
    ),
    make_case(
        "in_place_first",
        "a first layer that overwrites the inputs",
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        vectors(3),
        logit(0),
        inputs=Inputs(),
        params=ALL_PARAMS,
    ),
    make_case(
        "gru_tuple",
        "a recurrent module that returns a tuple",
        models.TupleRecurrent,
        lambda data: Batch(data.normal(2, 3)),
        all_logits(),
        tags="recurrent no_vmap",
        inputs=Inputs(),
        activations=Activations("gru"),
        params=ALL_PARAMS,
    ),
    make_case(
        "time_major",
        "activations whose first axis is time, not the batch",
        models.TimeMajor,
        lambda data: Batch(data.normal(2, 3)),
        logit(0),
        tags="recurrent no_vmap",
        inputs=Inputs(),
        activations=Activations("gru", batch_axis=1),
    ),
    *(
        make_case(
            f"transformer_norm_{'first' if norm_first else 'last'}",
            "the stock transformer, whose inference path and fused attention must not be taken",
            functools.partial(models.Transformer, norm_first),
            _sequences,
            loss(F.cross_entropy),
            tags="attention",
            inputs=Inputs(),
            activations=Activations("encoder.layers.*"),
            params=Params("encoder.layers.0.**"),
        )
        for norm_first in (False, True)
    ),
    make_case(
        "frozen_transformer",
        "fused attention without any parameter that requires grad",
        _frozen_transformer,
        _sequences,
        logit(0),
        tags="attention",
        inputs=Inputs(),
        outputs=Outputs(),
    ),
    *(
        make_case(
            f"attention_{'with' if weights else 'without'}_weights",
            "multi-head attention with a padding mask; without returned weights it is fused",
            functools.partial(models.Attention, weights),
            lambda data: Batch((data.normal(3, 4), torch.arange(3).expand(data.n, 3) > torch.arange(data.n)[:, None])),
            logit(2),
            tags="attention",
            inputs=Inputs(),
            activations=Activations("attention"),
            params=ALL_PARAMS,
        )
        for weights in (False, True)
    ),
    make_case(
        "bare_attention",
        "scaled dot-product attention as a function, which has no double backward on its fast kernels",
        models.BareAttention,
        _sequences,
        logit(1),
        tags="attention",
        inputs=Inputs(),
        params=ALL_PARAMS,
    ),
    make_case(
        "autoencoder",
        "a scalar with two paths to the inputs",
        lambda: mlp(3, 2, 3),
        vectors(3),
        reconstruction,
        **EVERYWHERE,
    ),
    make_case(
        "weight_norm", "a parametrized weight", _weight_norm, vectors(3), logit(1), inputs=Inputs(), params=ALL_PARAMS
    ),
    make_case(
        "residual_reused_norm",
        "one normalization in every block, as in weight-tied residual networks",
        models.Residual,
        vectors(4),
        logit(1),
        **EVERYWHERE,
    ),
    make_case(
        "bare_parameters",
        "parameters in lists and dictionaries, one without axes, and no submodule",
        models.BareParameters,
        vectors(3),
        all_logits(),
        inputs=Inputs(),
        params=ALL_PARAMS,
    ),
    make_case(
        "branching",
        "Python control flow on values, which vmap cannot follow",
        models.Branching,
        vectors(3),
        logit(1),
        tags="no_vmap",
        inputs=Inputs(),
        params=ALL_PARAMS,
    ),
    make_case(
        "checkpointed",
        "activation checkpointing, which torch.func refuses",
        models.Checkpointed,
        vectors(3),
        logit(1),
        tags="no_vmap",
        inputs=Inputs(),
        params=ALL_PARAMS,
    ),
    make_case(
        "old_function",
        "an old-style autograd.Function, which torch.func refuses",
        models.OldFunction,
        vectors(3),
        logit(1),
        tags="no_vmap",
        inputs=Inputs(),
        params=ALL_PARAMS,
    ),
    make_case(
        "token_ids",
        "integer inputs, to be differentiated at the embedding",
        lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=0), models.MeanOverTokens(), mlp(4, 3, 2)),
        lambda data: Batch(data.integers(7, 5)),
        logit(1),
        activations=Activations("0"),
        params=ALL_PARAMS,
    ),
    make_case(
        "causal_language_model",
        "outputs as an object, shifted labels, -100, and a tied last layer",
        models.FakeForCausalLM,
        _token_ids(causal=True),
        loss(F.cross_entropy),
        outputs=Outputs(),
        activations=Activations("embedding"),
        params=ALL_PARAMS,
    ),
    make_case(
        "token_classifier",
        "one label per token, some of them ignored",
        models.FakeForTokenClassification,
        _token_ids(causal=False),
        token_loss(F.cross_entropy),
        activations=Activations("mix"),
        outputs=Outputs(),
        params=ALL_PARAMS,
    ),
    make_case(
        "token_outputs",
        "outputs with an axis of tokens",
        lambda: mlp(4, 3, 2),
        lambda data: Batch(data.normal(3, 4), data.integers(2, 3)),
        logit(1),
        **EVERYWHERE,
    ),
    make_case(
        "regression",
        "outputs without a class axis, and targets of floating point",
        lambda: models.Flat(3),
        lambda data: Batch(data.normal(3), data.normal()),
        loss(F.mse_loss),
        **EVERYWHERE,
    ),
    make_case("single_example", "a batch of one", lambda: mlp(3, 4, 2), vectors(3), all_logits(), n=1, **EVERYWHERE),
    make_case(
        "float32",
        "float32",
        lambda: mlp(3, 4, 2),
        vectors(3),
        all_logits(),
        tags="float32",
        dtype=torch.float32,
        **EVERYWHERE,
    ),
    make_case(
        "bfloat16",
        "bfloat16, where sums must not be taken in low precision",
        lambda: mlp(3, 4, 2),
        vectors(3),
        all_logits(),
        tags="bfloat16",
        dtype=torch.bfloat16,
        **EVERYWHERE,
    ),
)
