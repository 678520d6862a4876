"""One example as the model sees it: its targets, their losses and predictions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.attribution.similarity._scalar import default_scalar, per_token, shifted
from gradreg.batch import Batch, as_batch
from gradreg.errors import BatchError, GradregError, NonFiniteLossError, ScalarError
from gradreg.model import call
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
    named = batch.named_inputs()
    ids = named.get("input_ids", batch.inputs if isinstance(batch.inputs, Tensor) else None)
    if batch.targets is None and is_causal_language_model(model) and isinstance(ids, Tensor):
        mask = named.get("attention_mask")
        labels = ids if not isinstance(mask, Tensor) or mask.dim() != 2 else ids.masked_fill(mask == 0, _IGNORED)
        batch = replace(batch, targets=labels)
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    known = getattr(embeddings, "num_embeddings", None)
    if isinstance(known, int):
        for key in ("input_ids", "decoder_input_ids"):
            _check_vocabulary(named.get(key), known, f"{name}[{key!r}]", model)
    return batch


def _check_vocabulary(ids: Any, known: int, where: str, model: nn.Module) -> None:
    if isinstance(ids, Tensor) and not ids.is_floating_point() and bool(((ids < 0) | (ids >= known)).any()):
        wrong = int(ids[(ids < 0) | (ids >= known)][0])
        raise BatchError(
            f"{where} holds the token {wrong}, but {type(model).__name__} knows {known} tokens (0 to {known - 1}). The tokenizer "
            "does not belong to the model, or tokens were added without model.resize_token_embeddings(len(tokenizer))."
        )


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
    try:
        outputs = call(model, batch.map(Tensor.clone))
    except IndexError as problem:
        raise BatchError(
            f"{type(model).__name__} cannot read {name}: {problem}. A token or position lies outside of its tables."
        ) from problem
    if of is None:
        of = default_scalar(model, outputs, batch)
    elif isinstance(batch.targets, Tensor) and batch.targets.dim() > 1:
        of = per_token(of)
    chosen = bind(of, model)
    check = getattr(chosen, "check_targets", None)
    if check is not None:
        check(outputs, batch)
    try:
        values = check_scalar(chosen(outputs, batch), len(batch), chosen)
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
        raise BatchError(
            f"{name} has no target that counts: all labels are -100 (or there is only one token, and nothing to predict from "
            "it). Give labels with at least one token."
        )
    for place, value in zip(example.positions, example.losses, strict=True):
        if not torch.isfinite(torch.tensor(value)):
            raise NonFiniteLossError(
                f"{name}: the scalar of target {place} is {value}. Look at the weights and at this example; a gradient of it "
                "explains nothing."
            )


def texts_of(example: Example, model: nn.Module, tokenizer: Any) -> list[str]:
    """Return the targets as people read them: class names, tokens, or `#7` without a tokenizer."""
    if example.ids is None:
        return [f"target {place}" for place in example.positions]
    if example.classes:
        names = getattr(getattr(model, "config", None), "id2label", None) or {}
        return [str(names.get(one, f"class {one}")) for one in example.ids]
    if tokenizer is None:
        return [f"#{one}" for one in example.ids]
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return [_token_text(tokenizer, one) for one in example.ids]
    found = [str(text) for text in tokenizer(list(example.ids))]
    if len(found) != len(example.ids):
        raise GradregError(
            f"tokenizer gave {len(found)} texts for {len(example.ids)} token ids; one text per id is needed."
        )
    return found


def _token_text(tokenizer: Any, one: int) -> str:
    token = tokenizer.convert_ids_to_tokens(one)
    if token is None:
        return f"#{one}"
    text = str(tokenizer.decode([one], clean_up_tokenization_spaces=False))
    if not text or "�" in text:
        return str(token)  # part of a letter
    # SentencePiece drops the space that the token stands for
    return text if not str(token).startswith("▁") or text.startswith(" ") else f" {text}"


def special_ids(model: nn.Module, tokenizer: Any) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids that end a sequence, and all special ids, from the tokenizer and the configurations."""
    ends: set[int] = set()
    others: set[int] = set()
    for source in (tokenizer, getattr(model, "config", None), getattr(model, "generation_config", None)):
        ends |= _ids(getattr(source, "eos_token_id", None))
        for name in ("bos", "pad", "sep", "cls", "decoder_start"):
            others |= _ids(getattr(source, f"{name}_token_id", None))
    others |= _ids(list(getattr(tokenizer, "all_special_ids", ()) or ())) - _ids(
        getattr(tokenizer, "unk_token_id", None)
    )
    return frozenset(ends), frozenset(ends | others)


def _ids(found: Any) -> set[int]:
    items: Sequence[Any] = found if isinstance(found, (list, tuple)) else [found]
    return {int(one) for one in items if isinstance(one, int) and not isinstance(one, bool)}


def shown(text: str) -> str:
    """Return a token as one visible word."""
    return re.sub(r"\s", lambda found: {"\n": "⏎", "\t": "⇥"}.get(found[0], "·"), text) or "''"
