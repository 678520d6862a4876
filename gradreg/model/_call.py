"""Calling a model on a Batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.errors import BatchError, GradregError
from gradreg.model._compatibility import unwrap
from gradreg.model._readable import unreadable


def call(model: nn.Module, batch: Batch) -> Any:
    """Run the model on the inputs of a batch: a tensor alone, a tuple as positions, a mapping as keywords.

    A mapping is passed whole where the forward takes one positional argument that is not among its names. Labels never
    reach the model. Encoder-decoder models get their missing decoder inputs from the model's own shift of the labels.

    Args:
        model: Any module.
        batch: The batch.

    Returns:
        What the model returns.

    Raises:
        BatchError: If the model fails because of what the batch holds, such as ids that it does not know. All else that it raises
            is passed on.
    """
    try:
        return _called(model, batch)
    except (RuntimeError, IndexError, ValueError) as problem:
        why = None if isinstance(problem, GradregError) else unreadable(unwrap(model), batch, problem)
        if why is None:
            raise
        raise why from problem


def _called(model: nn.Module, batch: Batch) -> Any:
    inputs = batch.inputs
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    inner = unwrap(model)
    named = dict(inputs)
    named.update(_decoder_inputs(inner, named, batch.targets))
    return model(named) if _takes_mapping(inner, named) else model(**named)


def base_features(model: Any, batch: Batch) -> Tensor:
    """Return the features of a `SharedBase` for a batch."""
    inputs = batch.inputs
    if isinstance(inputs, Tensor):
        features: Tensor = model.features(inputs)
    elif isinstance(inputs, tuple):
        features = model.features(*inputs)
    else:
        features = model.features(**inputs)
    return features


def invoke(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module; keywords alone are passed as one mapping where its forward takes a mapping."""
    if kwargs and not args and _takes_mapping(module, kwargs):
        return module(kwargs)
    return module(*args, **kwargs)


def _takes_mapping(model: nn.Module, named: Mapping[str, Any]) -> bool:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**named)
    except TypeError as problem:
        try:
            signature.bind(named)
            if named.keys() & signature.parameters.keys():
                raise problem  # the mapping holds its arguments, and some that it does not know
        except TypeError:
            raise BatchError(
                f"The inputs {sorted(named)} do not fit {type(model).__name__}.forward{signature}: {problem}."
            ) from None
        return True
    return False


def with_decoder_inputs(model: nn.Module, batch: Batch) -> Batch:
    """Return the batch with the decoder inputs that `call` would make from the labels, where the model needs such."""
    if not isinstance(batch.inputs, Mapping):
        return batch
    made = _decoder_inputs(model, batch.inputs, batch.targets)
    return replace(batch, inputs={**batch.inputs, **made}) if made else batch


def _decoder_inputs(model: nn.Module, named: Mapping[str, Any], targets: Any) -> dict[str, Tensor]:
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or not isinstance(targets, Tensor):
        return {}
    given = {"decoder_input_ids", "decoder_inputs_embeds"}
    if given & {name for name, value in named.items() if value is not None}:
        return {}
    if "decoder_input_ids" not in inspect.signature(model.forward).parameters or targets.dim() != 2:
        return {}
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        raise BatchError(
            f"{type(model).__name__} needs decoder_input_ids and has no shift of its own to make them from the labels; "
            "add decoder_input_ids to the inputs."
        )
    shifted: Tensor = shift(labels=targets)
    return {"decoder_input_ids": shifted.to(torch.long)}
