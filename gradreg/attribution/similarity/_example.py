"""One example as the model sees it: its targets, their losses and predictions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.attribution.similarity._scalar import default_scalar, per_token, shifted
from gradreg.batch import Batch, as_batch
from gradreg.errors import BatchError, NonFiniteLossError, ScalarError
from gradreg.model import call, check_readable
from gradreg.scalars import ScalarFunction, bind, check_scalar, is_causal_language_model, read_outputs
from gradreg.scalars._loss import Loss

_IGNORED = -100


@dataclass(frozen=True)
class Example:
    """An example after one forward.

    Attributes:
        batch: A batch of this example, with labels.
        of: The scalar, one value per target.
        values: Of all targets, `[targets]`.
        positions: The targets that count.
        ids: Labels of these, where they are integers.
        logits: Predictions of these, `[tokens, C]`, where they are logits over the labels.
        classes: Whether labels are classes and no tokens of a vocabulary.
        offset: How far the label of a target lies behind its prediction.
    """

    batch: Batch
    of: ScalarFunction
    values: Tensor
    positions: tuple[int, ...]
    ids: tuple[int, ...] | None
    logits: Tensor | None
    classes: bool
    offset: int = 0

    @property
    def output_bytes(self) -> int:
        """About how many bytes the model's outputs for this example take."""
        return 0 if self.logits is None else self.values.numel() * self.logits.shape[-1] * self.logits.element_size()

    @property
    def losses(self) -> list[float]:
        """The scalars that count."""
        found: list[float] = self.values[list(self.positions)].tolist()
        return found


def read_batch(given: Any, model: nn.Module, name: str) -> Batch:
    """Read a batch; a causal language model without labels gets its own tokens as labels, without padding.

    Raises:
        BatchError: If it cannot be read, or holds token ids that the model does not know.
    """
    batch = as_batch(given)
    check_readable(model, batch, name)
    named = batch.named_inputs()
    ids = named.get("input_ids", batch.inputs if isinstance(batch.inputs, Tensor) else None)
    if batch.targets is None and is_causal_language_model(model) and isinstance(ids, Tensor):
        mask = named.get("attention_mask")
        labels = ids if not isinstance(mask, Tensor) or mask.dim() != 2 else ids.masked_fill(mask == 0, _IGNORED)
        batch = replace(batch, targets=labels)
    if isinstance(batch.inputs, Mapping) and "use_cache" not in named and _takes(model, "use_cache"):
        # keys that a forward leaves in a cache are of no use here, and in the way where a part of the model runs again
        batch = replace(batch, inputs={**batch.inputs, "use_cache": False})
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if batch.targets is None and decodes and "decoder_input_ids" not in named:
        raise BatchError(f"{name} has no 'labels', which {type(model).__name__} reads its answer from, [1, tokens].")
    return batch


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


@torch.no_grad()
def read_examples(model: nn.Module, batch: Batch, of: ScalarFunction | None, name: str) -> list[Example]:
    """Run one forward and read every example of a batch.

    Args:
        model: In eval mode.
        batch: As `read_batch` gives it.
        of: The scalar; None for the one that suits the model.
        name: Of the argument, for messages.

    Raises:
        GradregError: If the batch does not fit the model, an example has no target that counts, or a loss is not finite.
    """
    outputs = call(model, batch.map(Tensor.clone))
    if of is None:
        of = default_scalar(model, outputs, batch)
    elif isinstance(batch.targets, Tensor) and batch.targets.dim() > 1:
        of = per_token(of)
    chosen = bind(of, model)
    check = getattr(chosen, "check_targets", None)
    if check is not None:
        check(outputs, batch)
    try:
        values = chosen(outputs, batch)
        if isinstance(values, Tensor) and values.dim() > 1 and values.shape[1] == 0:
            raise BatchError(_without_targets(name))
        values = check_scalar(values, len(batch), chosen)
    except IndexError as problem:  # torch's "Target 9 is out of bounds."
        raise ScalarError(
            f"{name}: a label lies outside of the classes that the model predicts ({problem})."
        ) from problem
    examples = [
        _read(model, batch[i : i + 1], chosen, values[i].reshape(-1), _row(outputs, i)) for i in range(len(batch))
    ]
    for i, example in enumerate(examples):
        _check(example, name if len(examples) == 1 else f"{name}, example {i}")
    return examples


def _row(outputs: Any, i: int) -> Tensor | None:
    try:
        return read_outputs(outputs)[i]
    except ScalarError:
        return None


def _read(model: nn.Module, batch: Batch, of: ScalarFunction, values: Tensor, logits: Tensor | None) -> Example:
    targets = batch.targets
    labels = None
    if isinstance(of, Loss) and isinstance(targets, Tensor) and not targets.is_floating_point():
        labels = (targets[:, 1:] if shifted(of) and targets.dim() > 1 else targets).reshape(-1)
    if labels is None or len(labels) != len(values):
        return Example(batch, of, values, tuple(range(len(values))), None, None, False)
    positions = (labels != _ignored(of)).nonzero().flatten().tolist()
    predictions = None
    if logits is not None and logits.dim() in (1, 2) and len(logits.reshape(-1, logits.shape[-1])) >= len(labels):
        predictions = logits.reshape(-1, logits.shape[-1])[: len(labels)][positions].detach()
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    known = getattr(embeddings, "num_embeddings", None)
    classes = targets.dim() == 1 or (known is not None and predictions is not None and predictions.shape[-1] < known)
    ids = tuple(int(one) for one in labels[positions].tolist())
    return Example(batch, of, values, tuple(positions), ids, predictions, classes, int(shifted(of)))


def _ignored(of: ScalarFunction) -> int:
    own = getattr(of, "function", None)
    keywords = getattr(getattr(own, "function", None), "keywords", {})
    return int(getattr(own, "ignore_index", keywords.get("ignore_index", _IGNORED)))


def _check(example: Example, name: str) -> None:
    if not example.positions:
        raise BatchError(_without_targets(name))
    for place, value in zip(example.positions, example.losses, strict=True):
        if not torch.isfinite(torch.tensor(value)):
            raise NonFiniteLossError(
                f"{name}: the scalar of target {place} is {value}. Look at the weights and at this example; a gradient of it "
                "explains nothing."
            )


def _without_targets(name: str) -> str:
    return (
        f"{name} has no target that counts: all labels are -100, or there is only one token and nothing to predict from it. Give "
        "labels with at least one token."
    )
