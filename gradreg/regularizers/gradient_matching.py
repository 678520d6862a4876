"""GradientMatching: small synthetic data that train as real data do (dataset condensation)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg.batch import Batch, as_batch
from gradreg.engine import gradients, linear_factors
from gradreg.errors import BatchError, CoupledExamplesError, GradregError
from gradreg.model import unwrap
from gradreg.penalties import MATCHINGS, check_eps, factored_row_distance, gradient_distance
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._environments import check_params, heads_of
from gradreg.scalars import ScalarFunction, loss
from gradreg.schedules import Schedule
from gradreg.wrt import Params, Wrt


class GradientMatching(Regularizer):
    r"""Distance of parameter gradients on synthetic and real data, $\sum_c D(\nabla_\theta L_c^{syn}, \nabla_\theta L_c^{real})$.

    The batch is the *synthetic* data, whose inputs require grad: they are what is trained. The real gradient is taken without
    graph. One mean loss per class c that occurs in the synthetic batch, each against the real examples of that class, summed
    over classes, as published; D is the sum over output rows of one minus the cosine (see `gr.penalties.gradient_distance`; the
    code adds 1e-6 to the product of norms, here eps is added to each squared norm).

    Where all parameters are of linear layers and classes are small, rows are compared without forming the gradients; otherwise
    the classes run forward and backward one by one.

    The penalty has a gradient with respect to the parameters too; train the images with an optimizer of their own. BatchNorm
    must be in eval mode: the published code sets its statistics by a real batch first.

    Args:
        weight: A number or schedule, read by `Objective`.
        real: The real data: a batch, or a function without arguments that returns the next one. May also be set as the attribute
            `real`, later.
        of: The loss of one example; cross-entropy unless said otherwise.
        wrt: The parameters.
        distance: `"cosine_rows"`, `"cosine"` or `"squared"`.
        by_class: Match the classes one by one. Else all data at once, for targets of any kind.
        eps: Added to squared norms.

    Raises:
        GradregError: If an argument is wrong; when called, if no input of the batch requires grad, or there are no real data.
        BatchError: When called, if a class of the synthetic batch is missing in the real one.

    References:
        Zhao, Mopuri, Bilen, "Dataset Condensation with Gradient Matching", ICLR 2021, arXiv 2006.05929.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> images = torch.randn(2, 3, requires_grad=True)
        >>> real = gr.Batch(torch.randn(8, 3), torch.tensor([0, 1] * 4))
        >>> penalty = gr.regularizers.GradientMatching(real=real)(net, (images, torch.tensor([0, 1])))
        >>> penalty.backward()
        >>> bool(images.grad.abs().sum() > 0)
        True
    """

    additive = False

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        real: Batch | Callable[[], Any] | None = None,
        of: ScalarFunction | None = None,
        wrt: Wrt | tuple[Wrt, ...] | None = None,
        distance: str = "cosine_rows",
        by_class: bool = True,
        eps: float = 1e-12,
    ) -> None:
        super().__init__(weight)
        check_eps(eps)
        if distance not in MATCHINGS:
            raise GradregError(f"distance={distance!r}; allowed are {', '.join(map(repr, MATCHINGS))}.")
        self.real = real
        self.of: ScalarFunction = loss(F.cross_entropy) if of is None else of
        self.needs_targets = of is None or by_class
        self.wrt = check_params(Params("*") if wrt is None else wrt, "GradientMatching")
        self.distance = distance
        self.by_class = by_class
        self.eps = eps

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the distance, summed over classes."""
        if not any(isinstance(value, Tensor) and value.requires_grad for value in batch.named_inputs().values()):
            raise GradregError(
                "GradientMatching trains the inputs of its batch, but none requires grad: images.requires_grad_(True)."
            )
        real = self._real_batch()
        if not self.by_class:
            pairs = [(self._of(model, batch, True), self._of(model, real, False))]
        else:
            synthetic, real = _by_class(batch, real)
            short = self._from_factors(model, synthetic, real)
            if short is not None:
                return short
            sides = self._of(model, synthetic, True), self._of(model, real, False)
            # unbind, for the backward of indexing one class fills a tensor of all
            ours, theirs = ({name: value.unbind(0) for name, value in side.items()} for side in sides)
            count = len(next(iter(ours.values())))
            pairs = [({k: v[c] for k, v in ours.items()}, {k: v[c] for k, v in theirs.items()}) for c in range(count)]
        total = gradient_distance(*pairs[0], self.distance, self.eps)
        for one, other in pairs[1:]:
            total = total + gradient_distance(one, other, self.distance, self.eps)
        return total

    def _from_factors(self, model: nn.Module, synthetic: Batch, real: Batch) -> Tensor | None:
        """Return the distance from the inputs and cotangents of linear layers, where they are all and that is cheaper."""
        if self.distance != "cosine_rows" or not self._worthwhile(model, synthetic, real):
            return None
        try:
            ours = linear_factors(model, synthetic, self.of, self.wrt)
            theirs = linear_factors(model, real, self.of, self.wrt) if ours else None
        except CoupledExamplesError:
            return None  # examples mix behind a layer; the mean over a class has a gradient nevertheless
        if not ours or not theirs or not any(item.weight for item in ours.values()):
            return None
        parts: list[Tensor] = []
        for label in synthetic.targets.unique():
            rows, others = ((side.targets == label).nonzero().squeeze(1) for side in (synthetic, real))
            for name, item in ours.items():
                if item.weight:
                    constant = theirs[name].inputs.detach()[others], theirs[name].cotangents.detach()[others]
                    own = item.inputs[rows], item.cotangents[rows]
                    parts.append(factored_row_distance(own, constant, self.eps))
        return torch.stack(parts).sum()

    def _worthwhile(self, model: nn.Module, synthetic: Batch, real: Batch) -> bool:
        """Whether products of pairs of examples of a class cost less than the gradients of the classes."""
        layers = [module for module in unwrap(model).modules() if isinstance(module, nn.Linear)]
        counts = [
            (int((synthetic.targets == label).sum()), int((real.targets == label).sum()))
            for label in synthetic.targets.unique()
        ]
        pairs = sum(a * a + a * b + b * b for a, b in counts) * sum(x.in_features + x.out_features for x in layers)
        return pairs <= 2 * sum(a + b for a, b in counts) * sum(layer.weight.numel() for layer in layers)

    def _of(self, model: nn.Module, batch: Batch, differentiable: bool) -> dict[str, Tensor]:
        per = "group" if self.by_class else "batch"
        found = gradients(model, batch, self.of, self.wrt, per=per, mean=True, differentiable=differentiable)
        heads = heads_of(model)
        return found if heads == 1 else {name: value / heads for name, value in found.items()}

    def _real_batch(self) -> Batch:
        if self.real is None:
            raise GradregError(
                "GradientMatching has no real data to match: give real=(inputs, targets), or a function that returns the next "
                "batch."
            )
        given = self.real() if callable(self.real) and not isinstance(self.real, Batch) else self.real
        return as_batch(given)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}, distance={self.distance!r}, by_class={self.by_class}"


def _by_class(synthetic: Batch, real: Batch) -> tuple[Batch, Batch]:
    """Return both batches with their classes as groups, the real one cut to the classes of the synthetic one."""
    for name, batch in (("synthetic", synthetic), ("real", real)):
        targets = batch.targets
        if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point():
            found = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
            raise BatchError(
                f"The {name} batch needs integer labels [n] to be matched by class, found {found}. Or by_class=False."
            )
    wanted = synthetic.targets.unique()
    missing = [int(label) for label in wanted if not bool((real.targets == label).any())]
    if missing:
        raise BatchError(
            f"The real batch has no example of class {', '.join(map(str, missing))} to match; draw it by class."
        )
    kept = (real.targets.unsqueeze(1) == wanted).any(1).nonzero().squeeze(1)
    real = real[kept]
    return replace(synthetic, groups=synthetic.targets), replace(real, groups=real.targets)
