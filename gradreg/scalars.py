"""`of`: what is differentiated. A scalar maps the outputs of one head to `[n]` or `[n, *targets]`.

A scalar is any callable `(outputs, batch) -> tensor` whose first axis is the example. The classes here are the usual ones;
they are frozen, so that equal scalars are computed once in a shared session. Classes lie on the last axis (`axis=-1`).
Per-example data is read from `batch` only.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.errors import ScalarError, closest

__all__ = [
    "AcrossHeads",
    "ScalarFunction",
    "across_heads",
    "all_logits",
    "log_probability",
    "logit",
    "loss",
    "margin",
    "probability",
    "read_outputs",
    "token_loss",
    "top_logit",
    "true_logit",
]

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


@dataclass(frozen=True)
class _ClassScalar:
    """A scalar over the class axis."""

    output: str | int | None = None
    axis: int = -1

    def _logits(self, outputs: Any) -> Tensor:
        logits = read_outputs(outputs, self.output)
        if logits.dim() < 2:
            raise ScalarError(
                f"{type(self).__name__} needs a class axis, but the outputs have shape {tuple(logits.shape)}. For a model "
                "with one output per example use all_logits()."
            )
        return logits.movedim(self.axis, -1)

    def _pick(self, values: Tensor, index: int) -> Tensor:
        classes = values.shape[-1]
        if not -classes <= index < classes:
            raise ScalarError(f"{type(self).__name__}({index}) but the outputs have {classes} classes.")
        return values[..., index]


@dataclass(frozen=True)
class Logit(_ClassScalar):
    """See `logit`."""

    index: int = 0

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]` or `[n, *targets]`."""
        return self._pick(self._logits(outputs), self.index)


@dataclass(frozen=True)
class TopLogit(_ClassScalar):
    """See `top_logit`."""

    centered: bool = False

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]` or `[n, *targets]`."""
        logits = self._logits(outputs)
        if self.centered and logits.shape[-1] == 1:
            raise ScalarError(
                "top_logit(centered=True) of a single logit is zero everywhere: the mean over classes is the logit itself. "
                "One-logit heads have no direction that the loss cannot see; use of=logit(0)."
            )
        # argmax on detached values, then gather: ties and every route then agree on one index
        index = logits.detach().argmax(-1, keepdim=True)
        top = logits.gather(-1, index).squeeze(-1)
        return top - logits.mean(-1) if self.centered else top


@dataclass(frozen=True)
class TrueLogit(_ClassScalar):
    """See `true_logit`."""

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]` or `[n, *targets]`."""
        logits = self._logits(outputs)
        labels = _labels(batch, "true_logit()")
        if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
            raise ScalarError(
                f"true_logit() needs integer targets of shape {tuple(logits.shape[:-1])}, found {labels.dtype} of shape "
                f"{tuple(labels.shape)}."
            )
        valid = labels != IGNORED_LABEL
        picked = logits.gather(-1, labels.where(valid, 0).unsqueeze(-1)).squeeze(-1)
        return picked.where(valid, 0)


@dataclass(frozen=True)
class Margin(_ClassScalar):
    """See `margin`."""

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]` or `[n, *targets]`."""
        logits = self._logits(outputs)
        if logits.shape[-1] < 2:
            raise ScalarError("margin() needs at least two classes; the outputs have one. Use logit(0).")
        index = logits.detach().topk(2, -1).indices
        first, second = logits.gather(-1, index).unbind(-1)
        return first - second


@dataclass(frozen=True)
class Probability(_ClassScalar):
    """See `probability` and `log_probability`."""

    index: int = 0
    log: bool = False

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]` or `[n, *targets]`."""
        logits = self._logits(outputs)
        if logits.shape[-1] == 1:
            raise ScalarError("The softmax over one class is 1 everywhere, with gradient zero. Use logit(0).")
        return self._pick(F.log_softmax(logits, -1) if self.log else F.softmax(logits, -1), self.index)


@dataclass(frozen=True)
class AllLogits:
    """See `all_logits`."""

    output: str | int | None = None

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]` or `[n, *targets]`."""
        return read_outputs(outputs, self.output)


@dataclass(frozen=True)
class Loss:
    """See `loss` and `token_loss`."""

    function: Callable[[Tensor, Any], Tensor]
    mean: bool = False
    output: str | int | None = None
    shift: bool | str = "auto"
    per_token: bool = False

    def bind(self, model: nn.Module) -> Loss:
        """Decide whether outputs are shifted against the labels, from the model."""
        return replace(self, shift=is_causal_language_model(model)) if self.shift == "auto" else self

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]` or `[n, *targets]`."""
        name = "token_loss()" if self.per_token else "loss()"
        predictions, targets = paired(outputs, _targets(batch, name), output=self.output, shift=self.shift is True)
        values = self.function(predictions, targets)
        n = len(batch)
        if not isinstance(values, Tensor) or values.dim() == 0 or values.shape[0] != n:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ScalarError(
                f"{name} needs unreduced values with the example first: expected [{n}, ...], found {shape}. A loss "
                'function or module of torch is given reduction="none" for you; another callable must not reduce.'
            )
        if self.per_token:
            if values.dim() < 2:
                raise ScalarError(f"token_loss() needs one value per token, [n, tokens]; found {tuple(values.shape)}.")
            return values
        if values.dim() == 1:
            return values
        total = values.flatten(1).sum(1)
        return total / self._valid(values, targets) if self.mean else total

    def _valid(self, values: Tensor, targets: Any) -> Tensor | int:
        keywords = getattr(getattr(self.function, "function", None), "keywords", {})
        ignored = getattr(self.function, "ignore_index", keywords.get("ignore_index", IGNORED_LABEL))
        if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.shape == values.shape:
            valid: Tensor = targets != ignored
            return valid.flatten(1).sum(1).clamp(min=1)
        return values[0].numel()


@dataclass(frozen=True)
class AcrossHeads:
    """See `across_heads`."""

    function: ScalarFunction

    def bind(self, model: nn.Module) -> AcrossHeads:
        """Bind the wrapped scalar to the model."""
        return AcrossHeads(bind(self.function, model))

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalars, `[n]` or `[n, *targets]`."""
        return self.function(outputs, batch)


def logit(index: int, *, output: str | int | None = None, axis: int = -1) -> Logit:
    r"""The logit of one class, $z_i$.

    Args:
        index: The class.
        output: Which output to read, where the model returns several and none is called `logits`.
        axis: The class axis. Outputs `[n, T, C]` give `[n, T]`: one target per token.

    Raises:
        ScalarError: When called, if there is no such class or output.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Linear(3, 2)
        >>> g = gr.gradients(net, torch.zeros(4, 3), of=gr.logit(1), wrt=gr.Inputs())["inputs"]
        >>> torch.equal(g, net.weight[1].expand(4, 3))
        True
    """
    return Logit(index=index, output=output, axis=axis)


def top_logit(centered: bool = False, *, output: str | int | None = None, axis: int = -1) -> TopLogit:
    r"""The largest logit, $z_{c^*}$ with $c^* = \arg\max_c z_c$; centered: $z_{c^*} - \frac{1}{C}\sum_c z_c$.

    The index is taken on detached logits, then the logit itself is differentiated. The centered form does not change
    when a constant is added to all logits, which softmax and cross-entropy cannot see either.

    Args:
        centered: Subtract the mean over classes.
        output: Which output to read.
        axis: The class axis.

    Raises:
        ScalarError: When called, if centered and there is a single logit (the result would be zero).

    References:
        Teney, Abbasnejad, Lucey, van den Hengel 2022, arXiv 2105.05612 (the largest logit).

    Example:
        >>> import torch, gradreg as gr
        >>> gr.top_logit()(torch.tensor([[1.0, 3.0]]), gr.Batch(torch.zeros(1, 1)))
        tensor([3.])
        >>> gr.top_logit(centered=True)(torch.tensor([[1.0, 3.0]]), gr.Batch(torch.zeros(1, 1)))
        tensor([1.])
    """
    return TopLogit(centered=centered, output=output, axis=axis)


def true_logit(*, output: str | int | None = None, axis: int = -1) -> TrueLogit:
    """The logit of the target class; targets of -100 count as nothing (0).

    Args:
        output: Which output to read.
        axis: The class axis.

    Raises:
        ScalarError: When called, if the batch has no integer targets of the fitting shape.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.true_logit()(torch.tensor([[1.0, 3.0]]), gr.Batch(torch.zeros(1, 1), torch.tensor([0])))
        tensor([1.])
    """
    return TrueLogit(output=output, axis=axis)


def margin(*, output: str | int | None = None, axis: int = -1) -> Margin:
    """The largest logit minus the second largest, both picked on detached logits.

    Args:
        output: Which output to read.
        axis: The class axis.

    Raises:
        ScalarError: When called, if there are fewer than two classes.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.margin()(torch.tensor([[1.0, 3.0, 2.5]]), gr.Batch(torch.zeros(1, 1)))
        tensor([0.5000])
    """
    return Margin(output=output, axis=axis)


def probability(index: int, *, output: str | int | None = None, axis: int = -1) -> Probability:
    r"""The softmax probability of one class, $e^{z_i} / \sum_c e^{z_c}$. Its gradient vanishes for confident examples.

    Args:
        index: The class.
        output: Which output to read.
        axis: The class axis.

    Raises:
        ScalarError: When called, if there is no such class, or only one.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.probability(0)(torch.zeros(1, 4), gr.Batch(torch.zeros(1, 1)))
        tensor([0.2500])
    """
    return Probability(index=index, output=output, axis=axis)


def log_probability(index: int, *, output: str | int | None = None, axis: int = -1) -> Probability:
    r"""The log-probability of one class in nats, $z_i - \log\sum_c e^{z_c}$.

    Args:
        index: The class.
        output: Which output to read.
        axis: The class axis.

    Raises:
        ScalarError: When called, if there is no such class, or only one.

    Example:
        >>> import torch, gradreg as gr
        >>> gr.log_probability(0)(torch.zeros(1, 2), gr.Batch(torch.zeros(1, 1))).exp()
        tensor([0.5000])
    """
    return Probability(index=index, output=output, axis=axis, log=True)


def all_logits(*, output: str | int | None = None) -> AllLogits:
    """All outputs, each a target of its own: outputs `[n, C]` give gradients `[n, C, *wrt_shape]` (a Jacobian).

    Args:
        output: Which output to read.

    Raises:
        ScalarError: When called, if the outputs are no tensor and nothing was named.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Linear(3, 2)
        >>> gr.gradients(net, torch.zeros(4, 3), of=gr.all_logits(), wrt=gr.Inputs())["inputs"].shape
        torch.Size([4, 2, 3])
    """
    return AllLogits(output=output)


def loss(
    function: Callable[..., Any], mean: bool = False, *, output: str | int | None = None, shift: bool | str = "auto"
) -> Loss:
    """The loss of every example, from a loss function or module `(outputs, targets) -> values`.

    Functions that take `reduction` are called with `reduction="none"`, modules are copied with it; other callables must
    return unreduced values. An example's own axes are summed, or with `mean=True` averaged over its valid tokens (targets
    that are not ignored). Nothing is ever divided by the batch size.

    Args:
        function: For example `torch.nn.functional.cross_entropy` or `torch.nn.MSELoss()`.
        mean: Average over an example's own axes instead of summing.
        output: Which output to read.
        shift: Compare the outputs at position t with the label at t + 1, as causal language models need;
            `"auto"` does so for causal language models only.

    Raises:
        ScalarError: If the callable fixes its own reduction; when called, if targets are missing or values come reduced.

    Example:
        >>> import torch, gradreg as gr, torch.nn.functional as F
        >>> gr.loss(F.cross_entropy)(torch.zeros(3, 2), gr.Batch(torch.zeros(3, 1), torch.tensor([0, 1, 1])))
        tensor([0.6931, 0.6931, 0.6931])
    """
    return Loss(unreduced(function), mean=mean, output=output, shift=_checked_shift(shift))


def token_loss(function: Callable[..., Any], *, output: str | int | None = None, shift: bool | str = "auto") -> Loss:
    """The loss of every token, `[n, tokens]`; ignored labels (-100) give 0. With `shift`, one token fewer.

    Args:
        function: As in `loss`.
        output: Which output to read.
        shift: As in `loss`.

    Raises:
        ScalarError: As in `loss`; also when called, if there is no token axis.

    Example:
        >>> import torch, gradreg as gr, torch.nn.functional as F
        >>> batch = gr.Batch(torch.zeros(1, 3), torch.tensor([[0, 1, -100]]))
        >>> gr.token_loss(F.cross_entropy)(torch.zeros(1, 3, 2), batch)
        tensor([[0.6931, 0.6931, 0.0000]])
    """
    return Loss(unreduced(function), output=output, shift=_checked_shift(shift), per_token=True)


def across_heads(function: ScalarFunction) -> AcrossHeads:
    """A scalar that is given the outputs of all heads, `[n, K, ...]`, and mixes them into `[n]` or `[n, *targets]`.

    Args:
        function: `(outputs, batch) -> [n]` or `[n, *targets]`.

    Example:
        >>> import torch, gradreg as gr
        >>> model = gr.SharedBase(torch.nn.Linear(3, 4), [torch.nn.Linear(4, 2) for _ in range(5)])
        >>> of = gr.across_heads(lambda outputs, batch: outputs.mean(1)[:, 0])
        >>> gr.gradients(model, torch.zeros(2, 3), of=of, wrt=gr.Inputs())["inputs"].shape
        torch.Size([2, 3])
    """
    return AcrossHeads(function)


def paired(outputs: Any, targets: Any, *, output: str | int | None = None, shift: bool = False) -> tuple[Tensor, Any]:
    """Return predictions and targets as the losses of torch expect them.

    Shifted by one position for causal language models; with the class axis moved from the end to position 1 where the
    predictions are `[n, ..., C]` for integer targets `[n, ...]`.

    Raises:
        ScalarError: If regression targets would be broadcast against the predictions.
    """
    class_last = not isinstance(outputs, Tensor)  # the outputs of HF models carry the classes last
    predictions = read_outputs(outputs, output)
    if shift:
        predictions, targets = predictions[:, :-1], targets[:, 1:]
        class_last = True
    if not isinstance(targets, Tensor):
        return predictions, targets
    if targets.is_floating_point():
        if predictions.shape != targets.shape and predictions.squeeze().shape == targets.squeeze().shape:
            raise ScalarError(
                f"Predictions {tuple(predictions.shape)} and targets {tuple(targets.shape)} would be broadcast against each "
                "other; give the targets the shape of the predictions."
            )
    elif predictions.dim() >= 3 and targets.shape == predictions.shape[:-1]:
        torch_convention = targets.shape == predictions.shape[:1] + predictions.shape[2:]
        if class_last or not torch_convention:
            predictions = predictions.movedim(-1, 1)
    return predictions, targets


def bind(of: ScalarFunction, model: nn.Module) -> ScalarFunction:
    """Return the scalar with what it needs to know about the model."""
    return of.bind(model) if hasattr(of, "bind") else of


def is_causal_language_model(model: nn.Module) -> bool:
    """Whether the labels of a model are its own inputs, one position later."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    kind = getattr(model, "loss_type", None) or type(model).__name__
    return re.search(r"(ForCausalLM|LMHeadModel|DoubleHeadsModel)$", str(kind)) is not None


@dataclass(frozen=True)
class _Unreduced:
    """A loss function of torch with reduction="none"; equal for equal functions."""

    function: Callable[..., Any]

    def __call__(self, outputs: Tensor, targets: Any) -> Tensor:
        result: Tensor = self.function(outputs, targets, reduction="none")
        return result


@dataclass(frozen=True, eq=False)
class _UnreducedModule:
    """A loss module copied with reduction="none"; equal where the module it was made from is the same object."""

    module: nn.Module
    source: nn.Module

    @property
    def ignore_index(self) -> int:
        return int(getattr(self.module, "ignore_index", IGNORED_LABEL))

    def __call__(self, outputs: Tensor, targets: Any) -> Tensor:
        result: Tensor = self.module(outputs, targets)
        return result

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _UnreducedModule) and other.source is self.source

    def __hash__(self) -> int:
        return hash(id(self.source))


def unreduced(function: Callable[..., Any]) -> Callable[[Tensor, Any], Tensor]:
    """Return the loss with one value per element.

    Raises:
        ScalarError: If a partial already fixes a reduction other than "none".
    """
    if isinstance(function, (_Unreduced, _UnreducedModule)):
        return function
    if isinstance(function, nn.Module):
        if not hasattr(function, "reduction"):
            return function
        module = copy.copy(function)
        vars(module)["reduction"] = "none"
        return _UnreducedModule(module, function)
    if not callable(function):
        raise ScalarError(f"loss() needs a function or module (outputs, targets) -> values, found {function!r}.")
    fixed = getattr(function, "keywords", {}).get("reduction", "none")
    if fixed != "none":
        raise ScalarError(
            f"The loss fixes reduction={fixed!r}. Per-example values are needed: leave the reduction out, it is set for you."
        )
    try:
        takes_reduction = "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins without a signature
        takes_reduction = False
    return _Unreduced(function) if takes_reduction else function


def _checked_shift(shift: bool | str) -> bool | str:
    if shift not in (True, False, "auto"):
        raise ScalarError(f'shift={shift!r}; allowed are True, False and "auto".')
    return shift


def _targets(batch: Batch, name: str) -> Any:
    if batch.targets is None:
        raise ScalarError(
            f"{name} needs targets, but the batch has none. Pass (inputs, targets) or Batch(inputs, targets)."
        )
    return batch.targets


def _labels(batch: Batch, name: str) -> Tensor:
    targets = _targets(batch, name)
    if not isinstance(targets, Tensor):
        raise ScalarError(f"{name} needs the targets as one tensor, found a {type(targets).__name__}.")
    return targets


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
    if not values.is_floating_point():
        raise ScalarError(f"of={of!r} returned {values.dtype}; only real floating-point values can be differentiated.")
    return values


def check_labels(task: object, outputs: Any, targets: Any) -> None:
    """Refuse labels outside the classes before a classification loss of torch is called.

    Args:
        task: The loss; only cross-entropy and negative log-likelihood are looked at.
        outputs: Outputs with the classes on the last axis.
        targets: Labels.

    Raises:
        ScalarError: If a label lies outside 0 ... C - 1 and is not ignored.
    """
    classification = (nn.CrossEntropyLoss, nn.NLLLoss)
    if task not in (F.cross_entropy, F.nll_loss) and not isinstance(task, classification):
        return
    if not isinstance(targets, Tensor) or targets.is_floating_point() or not isinstance(outputs, Tensor):
        return
    if outputs.dim() < 2 or targets.dim() != 1:
        return
    ignored, classes = getattr(task, "ignore_index", IGNORED_LABEL), outputs.shape[-1]
    wrong = ((targets < 0) | (targets >= classes)) & (targets != ignored)
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        raise ScalarError(
            f"Label {int(targets[position])} of example {position} lies outside the {classes} classes of the outputs "
            f"(0 to {classes - 1}); {int(wrong.sum())} labels do."
        )
