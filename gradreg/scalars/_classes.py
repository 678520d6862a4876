"""Scalars over the class axis: logits, margins, probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gradreg.batch import Batch
from gradreg.errors import ScalarError
from gradreg.scalars._outputs import IGNORED_LABEL, check_range, read_outputs, read_targets


@dataclass(frozen=True)
class _ClassScalar:
    """A scalar over the class axis."""

    output: str | int | None = None
    axis: int = -1

    def takes_all_heads(self, dim: int) -> bool:
        """Whether outputs `[n, K, ..., C]` of all heads, with so many axes, may be given at once: each row is read alone."""
        return -(dim - 2) <= self.axis < 0

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
        number: Any = index  # numbers of NumPy and tensors without axes are fine
        if not hasattr(number, "__index__") or (isinstance(number, Tensor) and number.dim() > 0):
            raise ScalarError(
                f"{type(self).__name__}({index!r}) but a class is one number, here 0 to {classes - 1}. For one class per "
                "example put them into the batch as targets and use true_logit(); numbers of names are in config.label2id."
            )
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

    def check_targets(self, outputs: Any, batch: Batch) -> None:
        """Refuse labels outside the classes of the outputs, of one head or of all."""
        if isinstance(batch.targets, Tensor) and self.axis == -1:
            check_range(batch.targets, read_outputs(outputs, self.output).shape[-1])

    def takes_all_heads(self, dim: int) -> bool:
        """Return False: the targets `[n, ...]` fit one head."""
        return False

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


def _labels(batch: Batch, name: str) -> Tensor:
    targets = read_targets(batch, name)
    if not isinstance(targets, Tensor):
        raise ScalarError(f"{name} needs the targets as one tensor, found a {type(targets).__name__}.")
    return targets
