"""The Jacobian of all logits, and the gradients that are combinations of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.attribution._assemble import warn_of_non_finite
from gradreg.attribution._check import number
from gradreg.batch import Batch, as_batch, check_chunk_size
from gradreg.engine import values_and_gradients
from gradreg.errors import GradregError, ScalarError
from gradreg.scalars import read_outputs
from gradreg.wrt import Params, Wrt, as_wrt

__all__ = ["LogitJacobian", "logit_jacobian"]

IGNORED_LABEL = -100


@dataclass(frozen=True, eq=False)
class LogitJacobian:
    r"""Gradients of all logits, and what follows from them: $\partial g(z) = \sum_k (\partial g / \partial z_k)\, J_k$.

    Each method returns gradients by key, as `gradients` would for that scalar, without another forward or backward. A token
    classifier uses each token's own softmax.

    Args:
        logits: z, `[n, C]`, for token classifiers `[n, T, C]`, with heads `[n, K, ..., C]`.
        by_key: J, `[*logits.shape, *shape]` per key.

    Example:
        >>> import torch, gradreg as gr
        >>> jacobian = gr.logit_jacobian(torch.nn.Linear(3, 2), torch.zeros(4, 3), gr.Inputs())
        >>> jacobian.probability(0)["inputs"].shape, bool(jacobian.probability()["inputs"].sum(1).abs().max() < 1e-6)
        (torch.Size([4, 3]), True)
    """

    logits: Tensor
    by_key: Mapping[str, Tensor]

    def __repr__(self) -> str:
        """Return the shapes; the numbers would fill screens."""
        shapes = ", ".join(f"{key!r} {list(value.shape)}" for key, value in self.by_key.items())
        return f"LogitJacobian of logits {list(self.logits.shape)}: {shapes}"

    def logit(self, index: int | None = None) -> dict[str, Tensor]:
        """Return the gradient of one logit, `[n, ..., *shape]`, or `[n, ..., C, *shape]` of all."""
        if index is None:
            return dict(self.by_key)
        self._check(index)
        return {key: value.select(self.logits.dim() - 1, index) for key, value in self.by_key.items()}

    def probability(self, index: int | None = None) -> dict[str, Tensor]:
        r"""Return $\partial p_c = p_c (J_c - \sum_k p_k J_k)$ of one class, or `[n, ..., C, *shape]` of all."""
        p = F.softmax(self.logits, -1)
        eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        return self._picked(p.unsqueeze(-1) * (eye - p.unsqueeze(-2)), index)

    def log_probability(self, index: int | None = None) -> dict[str, Tensor]:
        r"""Return $\partial \log p_c = J_c - \sum_k p_k J_k$ of one class, or `[n, ..., C, *shape]` of all."""
        p = F.softmax(self.logits, -1)
        eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        return self._picked(eye - p.unsqueeze(-2), index)

    def margin(self, first: int | None = None, second: int | None = None) -> dict[str, Tensor]:
        """Return the gradient of one logit minus another; None: the largest, and the largest of the others.

        Args:
            first: A class.
            second: Another class.
        """
        if self.logits.shape[-1] < 2:
            raise ScalarError("margin() needs at least two classes; there is one.")
        z = self.logits.detach()
        one = z.argmax(-1) if first is None else torch.full(z.shape[:-1], self._check(first), device=z.device)
        others = z.scatter(-1, one.unsqueeze(-1), -torch.inf)
        two = others.argmax(-1) if second is None else torch.full_like(one, self._check(second))
        if first is not None and bool((one == two).all()):
            raise ScalarError(f"margin({first}, {second}) is the difference of a logit from itself; give two classes.")
        classes = z.shape[-1]
        return self.combined((F.one_hot(one, classes) - F.one_hot(two, classes)).to(z.dtype))

    def entropy(self) -> dict[str, Tensor]:
        r"""Return the gradient of the entropy in nats, $-\sum_k p_k (\log p_k + H) J_k$."""
        log_p = F.log_softmax(self.logits, -1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        return self.combined(-p * (log_p + entropy))

    def loss(self, targets: Tensor, *, label_smoothing: float = 0.0) -> dict[str, Tensor]:
        r"""Return the gradient of the cross-entropy, $\sum_k (p_k - y_k) J_k$, of every example and token; unreduced.

        Args:
            targets: Classes `[n, ...]`, -100 for none; or probabilities `[n, ..., C]`.
            label_smoothing: As in `torch.nn.functional.cross_entropy`.

        Raises:
            ScalarError: If the targets do not fit.
        """
        if not isinstance(targets, Tensor):
            raise ScalarError(f"targets are a {type(targets).__name__}; expected a tensor of classes or probabilities.")
        if not 0 <= label_smoothing <= 1:
            raise ScalarError(f"label_smoothing={label_smoothing!r}; allowed are numbers from 0 to 1.")
        p = F.softmax(self.logits, -1)
        classes = p.shape[-1]
        if targets.is_floating_point():
            if targets.shape != p.shape:
                raise ScalarError(f"Targets {tuple(targets.shape)} do not fit logits {tuple(p.shape)}.")
            y, counted = targets.to(p), None
        else:
            if targets.shape != p.shape[:-1]:
                raise ScalarError(f"Targets {tuple(targets.shape)} do not fit logits {tuple(p.shape)}.")
            counted = targets != IGNORED_LABEL
            if bool(((targets < 0) | (targets >= classes))[counted].any()):
                raise ScalarError(f"Targets lie outside the {classes} classes.")
            y = F.one_hot(targets.where(counted, 0), classes).to(p)
        y = (1 - label_smoothing) * y + label_smoothing / classes
        weights = p * y.sum(-1, keepdim=True) - y
        return self.combined(weights if counted is None else weights * counted.unsqueeze(-1))

    def combined(self, weights: Tensor) -> dict[str, Tensor]:
        """Return sums of rows with weights `[n, ..., C]` (gradients `[n, ..., *shape]`), or `[n, ..., Q, C]` (of Q at once).

        Args:
            weights: The derivatives of a scalar by the logits.

        Raises:
            ScalarError: If they do not fit.
        """
        z = self.logits
        several = weights.dim() == z.dim() + 1
        if weights.shape != (*z.shape[:-1], *weights.shape[z.dim() - 1 : -1], z.shape[-1]):
            raise ScalarError(f"Weights {tuple(weights.shape)} do not fit logits {tuple(z.shape)}.")
        rows = weights if several else weights.unsqueeze(-2)
        found = {}
        for key, value in self.by_key.items():
            shape = value.shape[z.dim() :]
            product = (rows.to(value) @ value.reshape(*z.shape, -1)).reshape(*rows.shape[:-1], *shape)
            found[key] = product if several else product.squeeze(z.dim() - 1)
        return found

    def _picked(self, weights: Tensor, index: int | None) -> dict[str, Tensor]:
        return self.combined(weights if index is None else weights.select(-2, self._check(index)))

    def _check(self, index: int) -> int:
        return number(index, self.logits.shape[-1], "class")


@dataclass(frozen=True)
class _Rows:
    """All logits, of some tokens where they are named."""

    output: str | int | None
    tokens: tuple[int, ...] | None

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        logits = read_outputs(outputs, self.output)
        if self.tokens is None:
            return logits
        if logits.dim() < 3:
            raise ScalarError(
                f"tokens={list(self.tokens)}, but the logits {tuple(logits.shape)} have no axis of tokens."
            )
        length = logits.shape[-2]
        return logits[..., [number(token, length, "token") for token in self.tokens], :]


def logit_jacobian(
    model: nn.Module,
    batch: Any,
    wrt: Wrt | tuple[Wrt, ...],
    *,
    output: str | int | None = None,
    tokens: list[int] | tuple[int, ...] | None = None,
    differentiable: bool = False,
    chunk_size: int | None = None,
) -> LogitJacobian:
    r"""All gradients $J_c = \partial z_c / \partial h$ of all logits, from one forward and one pullback per logit.

    The pullbacks serve all of `wrt` together: embeddings, hidden states, attention maps. Gradients of logits, probabilities,
    log-probabilities, margins, the entropy and losses follow without any further pass; see `LogitJacobian`.

    Args:
        model: As in `gradients`.
        batch: As in `gradients`.
        wrt: `Inputs()`, `Embeddings()`, `Activations(glob)`, `AttentionMaps()`, `Features()`, or a tuple of them.
        output: Which output to read, where the model returns several and none is called `logits`.
        tokens: Positions, where not all tokens of a token classifier or language model are wanted: each costs C pullbacks.
        differentiable: Keep the graph, also through the probabilities.
        chunk_size: Examples at a time; None: all.

    Returns:
        The Jacobian, with `logits` `[n, ..., C]`.

    Raises:
        GradregError: As `gradients`.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> jacobian = gr.logit_jacobian(net, torch.zeros(5, 3), (gr.Inputs(), gr.Activations("1")))
        >>> {key: tuple(value.shape) for key, value in jacobian.by_key.items()}
        {'inputs': (5, 2, 3), '1': (5, 2, 4)}
    """
    batch = as_batch(batch)
    check_chunk_size(chunk_size)
    if any(isinstance(item, Params) for item in as_wrt(wrt)):
        raise GradregError(
            f"wrt={wrt!r}; gradients of parameters are what gradients(model, batch, all_logits(), wrt) gives."
        )
    if tokens is not None and not isinstance(tokens, (list, tuple, range)):
        raise GradregError(f"tokens={tokens!r}; allowed are None for all and a list of positions.")
    of = _Rows(output, None if tokens is None else tuple(tokens))
    parts = [
        values_and_gradients(model, chunk, of, wrt, differentiable=differentiable)
        for chunk in (batch.chunks(chunk_size) if chunk_size is not None and chunk_size < len(batch) else [batch])
    ]
    logits = torch.cat([values for values, _ in parts]) if len(parts) > 1 else parts[0][0]
    if logits.dim() < 2:
        raise ScalarError(f"The outputs have shape {tuple(logits.shape)}: there is no axis of classes.")
    by_key = {
        key: torch.cat([found[key] for _, found in parts]) if len(parts) > 1 else value
        for key, value in parts[0][1].items()
    }
    warn_of_non_finite(by_key, logits)
    return LogitJacobian(logits, by_key)
