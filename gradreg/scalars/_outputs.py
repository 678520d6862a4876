"""Reading what a model returns, and pairing it with targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.errors import ScalarError, closest

ScalarFunction: TypeAlias = Callable[[Any, Batch], Tensor]

IGNORED_LABEL = -100


def read_outputs(outputs: Any, output: str | int | None = None) -> Tensor:
    """Return the tensor that scalars read: the outputs themselves, their `logits`, or the output that was named.

    Raises:
        ScalarError: If the outputs are not a tensor, have no logits, and no name was given.
    """
    if output is not None:
        if isinstance(output, int) and isinstance(outputs, (tuple, list)):
            if not -len(outputs) <= output < len(outputs):
                raise ScalarError(f"output={output} but the model returned {len(outputs)} outputs.")
            value = outputs[output]
        elif isinstance(outputs, Mapping):
            if output not in outputs:
                raise ScalarError(f"The model's output has no {output!r}; it has {closest(str(output), outputs)}.")
            value = outputs[output]
        elif hasattr(outputs, str(output)):
            value = getattr(outputs, str(output))
        else:
            raise ScalarError(f"The model's output is a {type(outputs).__name__} without {output!r}.")
    elif isinstance(outputs, Tensor):
        return outputs
    elif isinstance(outputs, Mapping) and "logits" in outputs:
        value = outputs["logits"]
    elif getattr(outputs, "logits", None) is not None:
        value = outputs.logits
    else:
        names = closest("logits", outputs) if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
        raise ScalarError(
            f"The model's output is neither a tensor nor has it logits (found {names}). Name the output to read, for "
            'example logit(0, output="name"), or give a callable (outputs, batch) -> [n].'
        )
    if not isinstance(value, Tensor):
        raise ScalarError(
            f"The output that was named ({output or 'logits'!r}) is a {type(value).__name__}, not a tensor."
        )
    return value


def read_targets(batch: Batch, name: str) -> Any:
    if batch.targets is None:
        raise ScalarError(
            f"{name} needs targets, but the batch has none. Pass (inputs, targets), Batch(inputs, targets), or a mapping "
            "with 'labels'."
        )
    return batch.targets


def paired(
    outputs: Any,
    targets: Any,
    *,
    output: str | int | None = None,
    shift: bool = False,
    axis: int | None = None,
    elementwise: bool = False,
) -> tuple[Tensor, Any]:
    """Return predictions and targets as the losses of torch expect them.

    Shifted by one position for causal language models; with the class axis moved to position 1 where it is named, or where
    predictions are `[n, ..., C]` for integer targets `[n, ...]`.

    Raises:
        ScalarError: If regression targets would be broadcast, or the class axis cannot be told from the shapes.
    """
    class_last = not isinstance(outputs, Tensor)  # the outputs of HF models carry the classes last
    predictions = read_outputs(outputs, output)
    if shift:
        predictions, targets = predictions[:, :-1], targets[:, 1:]
        class_last = True
    if axis is not None:
        return predictions.movedim(axis, 1), targets
    if not isinstance(targets, Tensor):
        return predictions, targets
    if targets.is_floating_point():
        alike = predictions.squeeze().shape == targets.squeeze().shape
        if predictions.shape != targets.shape and (elementwise or alike):
            raise ScalarError(
                f"Predictions {tuple(predictions.shape)} and targets {tuple(targets.shape)} would be broadcast against each "
                "other; give the targets the shape of the predictions."
            )
    elif predictions.dim() >= 3 and targets.shape == predictions.shape[:-1]:
        if not class_last and targets.shape == predictions.shape[:1] + predictions.shape[2:]:
            raise ScalarError(
                f"Outputs {tuple(predictions.shape)} with labels {tuple(targets.shape)}: the classes may lie on axis 1 or on the "
                "last axis. Say which: loss(fn, axis=1) or loss(fn, axis=-1); as a task, a function that moves the axis."
            )
        predictions = predictions.movedim(-1, 1)
    return predictions, targets


def bind(of: ScalarFunction, model: nn.Module) -> ScalarFunction:
    """Return the scalar with what it needs to know about the model."""
    return of.bind(model) if hasattr(of, "bind") else of


def scalar_key(of: ScalarFunction) -> tuple[object, ...]:
    """Return what tells a scalar from others without keeping it, and what it closes over, alive."""
    code = getattr(of, "__code__", None)
    if code is not None:
        return (code,)  # a lambda that is made anew at every step is still the same scalar
    try:
        return (type(of), hash(of))
    except TypeError:
        return (type(of), id(of))


def reads_targets(of: object) -> bool:
    """Whether a scalar of this package reads `batch.targets`; of a function of the user's own it is not known."""
    return hasattr(of, "check_targets")


def is_causal_language_model(model: nn.Module) -> bool:
    """Whether the labels of a model are its own inputs, one position later."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return _names_causal(str(getattr(model, "loss_type", None) or type(model).__name__))


@lru_cache(maxsize=64)  # asked at every step
def _names_causal(kind: str) -> bool:
    return re.search(r"(ForCausalLM|LMHeadModel|DoubleHeadsModel)$", kind) is not None


def check_scalar(values: Any, n: int, of: object) -> Tensor:
    """Return the values of a scalar, checked: a real floating-point tensor whose first axis is the example.

    Raises:
        ScalarError: If they are not.
    """
    if not isinstance(values, Tensor):
        raise ScalarError(
            f"of={of!r} returned a {type(values).__name__}; it must return a tensor [n] or [n, *targets]."
        )
    if values.dim() == 0 or values.shape[0] != n:
        raise ScalarError(
            f"of={of!r} returned shape {tuple(values.shape)} for {n} examples; it must return [n] or [n, *targets]. A loss "
            "that is reduced over the batch has no per-example gradient: do not reduce."
        )
    if values.numel() == 0:
        raise ScalarError(f"of={of!r} returned shape {tuple(values.shape)}: there is nothing to differentiate.")
    if not values.is_floating_point():
        raise ScalarError(f"of={of!r} returned {values.dtype}; only real floating-point values can be differentiated.")
    return values


def check_range(labels: Tensor, classes: int, ignored: int = IGNORED_LABEL) -> None:
    if labels.is_floating_point():
        return
    wrong = ((labels < 0) | (labels >= classes)) & (labels != ignored)
    if bool(wrong.any()):
        position = tuple(wrong.nonzero()[0].tolist())
        where = f"example {position[0]}" + (f" at {position[1:]}" if len(position) > 1 else "")
        raise ScalarError(
            f"Label {int(labels[position])} of {where} lies outside the {classes} classes of the outputs (0 to {classes - 1}); "
            f"{int(wrong.sum())} labels do."
        )
