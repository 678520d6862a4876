"""Choosing and combining the heads of a trained model by validation scores.

Heads that were made different are of use only if one of them, or some together, can be told to be right. `select` does so on data
of the training distribution; `select_oracle` on data of the test distribution, which shows what *could* be reached and is not
available where it would be needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradreg.batch import as_batch
from gradreg.engine import head_count
from gradreg.errors import BatchError, GradregError, HeadsError
from gradreg.model import call, unwrap
from gradreg.scalars import read_outputs

__all__ = ["RULES", "Selection", "scores", "select", "select_oracle"]

RULES = ("best", "top", "weighted", "mean")
Score = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Selection:
    """Heads that were chosen, and how their probabilities are combined.

    Attributes:
        rule: The rule they were chosen by.
        scores: The score of every head on the data it was chosen on, `[K]`.
        weights: The share of every head in the combination, `[K]`; they sum to one.
        oracle: Whether the data came from the distribution that is tested on. A result of an oracle says that a good
            head exists, not that it could be found.
    """

    rule: str
    scores: Float[Tensor, " heads"]
    weights: Float[Tensor, " heads"]
    oracle: bool

    @property
    def head(self) -> int:
        """The head of the highest score, the first one where several have it."""
        return int(self.scores.argmax())

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads that take part, by falling weight."""
        order = self.weights.argsort(descending=True, stable=True)
        return tuple(int(k) for k in order if self.weights[k] > 0)

    def probabilities(self, outputs: Float[Tensor, "n heads classes"]) -> Float[Tensor, "n classes"]:
        r"""Combine the heads' class probabilities, $\sum_k w_k\,\mathrm{softmax}(z_k)$; one logit per head is taken as binary.

        Args:
            outputs: The logits of all heads, `[n, K, C]`; with `C = 1`, those of class 1 against class 0.

        Returns:
            Probabilities `[n, C]`, or `[n, 2]` where there is one logit.

        Raises:
            HeadsError: If the number of heads differs.
        """
        if outputs.dim() != 3 or outputs.shape[1] != len(self.weights):
            raise HeadsError(
                f"The selection is of {len(self.weights)} heads; outputs must be [n, {len(self.weights)}, classes], found "
                f"{tuple(outputs.shape)}."
            )
        if outputs.shape[2] == 1:
            outputs = torch.cat([torch.zeros_like(outputs), outputs], 2)
        return torch.einsum("k,nkc->nc", self.weights.to(outputs), outputs.softmax(2))

    def predict(self, model: nn.Module, batch: Any, chunk_size: int = 2048) -> Int[Tensor, " n"]:
        """Return the predicted classes, `[n]`, with the model in eval mode and without gradients."""
        parts = [self.probabilities(outputs).argmax(1) for outputs, _ in _outputs(model, batch, chunk_size)]
        return torch.cat(parts)

    def __str__(self) -> str:
        kind = "oracle: chosen on the test distribution" if self.oracle else "chosen on validation data"
        shares = ", ".join(f"{k} ({float(self.weights[k]):.2f})" for k in self.heads[:5])
        more = f" and {len(self.heads) - 5} more" if len(self.heads) > 5 else ""
        return (
            f"heads {shares}{more} of {len(self.scores)} by {self.rule!r} ({kind}); best score {self.scores.max():.4f}"
        )


def scores(model: nn.Module, batch: Any, score: Score | None = None, chunk_size: int = 2048) -> Float[Tensor, " heads"]:
    """Return the mean score of every head, `[K]`; the model is in eval mode meanwhile, and left as it was.

    Args:
        model: A `SharedBase`, an `Ensemble` or another model whose outputs are `[n, K, C]`.
        batch: Inputs and targets.
        score: `(outputs, targets) -> [n]` for one head's outputs, larger is better; None: accuracy (1 or 0 per example).
        chunk_size: Examples at a time.

    Raises:
        BatchError: If there are no targets.
        HeadsError: If the outputs have no axis of heads.
        GradregError: If the score is not one number per example, or NaN.

    Example:
        >>> import torch, gradreg as gr
        >>> model = gr.Ensemble([torch.nn.Linear(3, 2) for _ in range(4)])
        >>> gr.heads.scores(model, (torch.randn(10, 3), torch.randint(2, (10,)))).shape
        torch.Size([4])
    """
    batch = as_batch(batch)
    if batch.targets is None:
        raise BatchError("Heads are scored against targets, but the batch has none. Pass (inputs, targets).")
    total: Tensor | None = None
    for outputs, targets in _outputs(model, batch, chunk_size):
        if score is None:
            part = _correct(outputs, targets).sum(0)
        else:
            part = torch.stack([_checked(score(own, targets), len(own), score).sum() for own in outputs.unbind(1)])
        total = part.double() if total is None else total + part.double()
    if total is None or bool(total.isnan().any()):
        raise GradregError(f"The score of a head is NaN: {total}. Look at the outputs of that head.")
    return (total / len(batch)).cpu()


def select(
    model: nn.Module,
    validation: Any,
    rule: str = "best",
    *,
    k: int | None = None,
    temperature: float = 0.05,
    score: Score | None = None,
    chunk_size: int = 2048,
) -> Selection:
    r"""Choose heads by their scores on validation data, and how to combine them.

    `"best"`: the one with the highest score. `"top"`: the average probabilities of the k best. `"weighted"`: all, with weights
    $w_k \propto \exp(s_k / T)$ of their scores. `"mean"`: all alike, whatever their scores. Of equal scores, the first head
    counts as better.

    Validation data of the *training* distribution cannot tell which feature will hold elsewhere: all heads are good there.
    Data of the test distribution can, which is what `select_oracle` is for.

    Args:
        model: A `SharedBase`, an `Ensemble` or another model whose outputs are `[n, K, C]`.
        validation: Inputs and targets that were not trained on.
        rule: One of the four names.
        k: Number of heads, for `"top"`.
        temperature: T, for `"weighted"`, in units of the score: a head that is worse by T counts e times less.
        score: As in `scores`.
        chunk_size: Examples at a time.

    Returns:
        The selection, with `oracle=False`.

    Raises:
        GradregError: If an argument does not fit the rule.
        HeadsError: If there are fewer than k heads.

    References:
        Teney, Abbasnejad, Lucey, van den Hengel 2022, arXiv 2105.05612 (a separate stage of selection).

    Example:
        >>> import torch, gradreg as gr
        >>> model = gr.Ensemble([torch.nn.Linear(3, 2) for _ in range(4)])
        >>> chosen = gr.heads.select(model, (torch.randn(10, 3), torch.randint(2, (10,))), rule="top", k=2)
        >>> chosen.weights.sum(), len(chosen.heads), chosen.oracle
        (tensor(1., dtype=torch.float64), 2, False)
        >>> chosen.predict(model, torch.randn(6, 3)).shape
        torch.Size([6])
    """
    return _selected(model, validation, rule, k, temperature, score, chunk_size, oracle=False)


def select_oracle(
    model: nn.Module,
    test: Any,
    rule: str = "best",
    *,
    k: int | None = None,
    temperature: float = 0.05,
    score: Score | None = None,
    chunk_size: int = 2048,
) -> Selection:
    """Choose heads as `select` does, by data of the very distribution that is tested on: an upper bound, not a method.

    What it reaches says whether a good head exists among the K. Use examples of that distribution that are not those of the
    test itself, and report the result as an oracle's; it says so of itself.

    Args:
        model: As in `select`.
        test: Inputs and targets of the test distribution.
        rule: As in `select`.
        k: As in `select`.
        temperature: As in `select`.
        score: As in `select`.
        chunk_size: As in `select`.

    Returns:
        The selection, with `oracle=True`.

    Raises:
        GradregError: As in `select`.

    Example:
        >>> import torch, gradreg as gr
        >>> model = gr.Ensemble([torch.nn.Linear(3, 2) for _ in range(4)])
        >>> "oracle" in str(gr.heads.select_oracle(model, (torch.randn(10, 3), torch.randint(2, (10,)))))
        True
    """
    return _selected(model, test, rule, k, temperature, score, chunk_size, oracle=True)


def _selected(
    model: nn.Module,
    batch: Any,
    rule: str,
    k: int | None,
    temperature: float,
    score: Score | None,
    chunk_size: int,
    *,
    oracle: bool,
) -> Selection:
    if rule not in RULES:
        raise GradregError(f"rule={rule!r}; allowed are {', '.join(map(repr, RULES))}.")
    if (rule == "top") != (k is not None) or (
        k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1)
    ):
        raise GradregError(
            f'k={k!r} with rule={rule!r}; rule="top" needs a number of heads k from 1, other rules take none.'
        )
    if not isinstance(temperature, (int, float)) or not 0 < temperature < float("inf"):
        raise GradregError(f"temperature={temperature!r}; it must be a positive, finite number.")
    found = scores(model, batch, score, chunk_size)
    if k is not None and k > len(found):
        raise HeadsError(f"k={k}, but the model has {len(found)} heads.")
    weights = torch.zeros_like(found)
    if rule == "weighted":
        weights = (found / temperature).softmax(0)
    elif rule == "mean":
        weights += 1 / len(found)
    else:
        weights[found.argsort(descending=True, stable=True)[: k or 1]] = 1 / (k or 1)
    return Selection(rule, found, weights, oracle)


def _outputs(model: nn.Module, batch: Any, chunk_size: int) -> list[tuple[Tensor, Any]]:
    """Return the outputs `[n, K, C]` and the targets, chunk by chunk; in eval mode, without gradients."""
    batch = as_batch(batch)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise GradregError(f"chunk_size={chunk_size!r}; allowed are integers from 1.")
    inner = unwrap(model)
    found: list[tuple[Tensor, Any]] = []
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            for part in batch.chunks(chunk_size):
                outputs = read_outputs(call(inner, part))
                if outputs.dim() != 3:
                    raise HeadsError(
                        f"Heads are chosen by outputs [n, K, classes]; a {type(inner).__name__} gives {tuple(outputs.shape)}."
                        + ("" if head_count(inner) else " Use a SharedBase or an Ensemble.")
                    )
                found.append((outputs, part.targets))
    finally:
        for module, training in modes:
            module.training = training
    return found


def _correct(outputs: Tensor, targets: Any) -> Tensor:
    """Return whether every head is right, `[n, K]`."""
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.shape != outputs.shape[:1]:
        found = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
        raise BatchError(f"Accuracy needs integer labels [n], found {found}; give score=... for other targets.")
    predicted = outputs.argmax(2) if outputs.shape[2] > 1 else (outputs[:, :, 0] > 0).to(targets.dtype)
    return predicted == targets.unsqueeze(1)


def _checked(values: Any, n: int, score: Score) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != (n,):
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise GradregError(f"score={score!r} must return one number per example, [{n}], found {found}.")
    return values
