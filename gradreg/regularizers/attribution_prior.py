"""AttributionPrior: what expected gradients shall look like."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.engine import gradients
from gradreg.errors import BatchError, GradregError
from gradreg.penalties import MetricLike, as_metric, gini, precise, total_variation
from gradreg.regularizers._base import Regularizer
from gradreg.regularizers._points import drawn, single_input
from gradreg.scalars import ScalarFunction, reads_targets, true_logit
from gradreg.schedules import Schedule
from gradreg.wrt import Inputs

Prior = Callable[[Tensor], Tensor]


class AttributionPrior(Regularizer):
    r"""A penalty $\Omega(\phi)$ on expected gradients.

    $\phi_i = \frac1k \sum_{j} (x_i - x'_{ij}) \odot \nabla_x f(x'_{ij} + \alpha_{ij} (x_i - x'_{ij}))$.

    References $x'$ come from a background set, $\alpha \sim U(0, 1)$. The attributions carry graph to all parameters, and with
    many samples they sum to $f(x) - E f(x')$. Priors:

    - `"smoothness"`: total variation, $\sum_j \lvert \phi_{j+1} - \phi_j \rvert$ over neighbors, a mean over examples;
    - `"sparsity"`: $-2 G(\bar\phi)$, with the Gini coefficient of the features' mean magnitudes $\bar\phi_d = \frac1n \sum_i
      \lvert \phi_{id} \rvert$
      (the value lies between -2 and 0; it belongs to the batch, not to examples);
    - a function of attributions `[m, *shape]` (one row per example, head and target) that returns `[m]`, averaged, or a scalar.

    Args:
        weight: A number or schedule, read by `Objective`.
        prior: One of the two names, or a function.
        references: Background inputs `[r, *shape]`, from which k are drawn for every example; or give them in the extras.
        samples: k.
        of: What is attributed; by default the logit of the true class.
        wrt: The input.
        multiply: Multiply by $x - x'$; without, the expected gradient itself is taken.
        metric: With a metric M gradients are replaced by $M^{1/2} g$, for a projection the projected gradient.

    Raises:
        GradregError: If a setting is unknown.
        BatchError: When called, if there are no references or they do not fit.

    Extras:
        `references` `[n, k, *shape]` instead of drawn ones. `alpha` `[n, k]`: fixed numbers instead of drawn ones.

    References:
        Erion, Janizek, Sturmfels, Lundberg, Lee, "Improving performance of deep learning models with axiomatic attribution priors
        and expected gradients", 2021, arXiv 1906.10670.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Softplus(), torch.nn.Linear(8, 2))
        >>> batch = gr.Batch(torch.randn(5, 6), torch.tensor([0, 1, 0, 1, 1]))
        >>> smooth = gr.regularizers.AttributionPrior(references=torch.zeros(1, 6))
        >>> small = gr.regularizers.AttributionPrior(prior=lambda a: a.square().sum(1), references=torch.zeros(1, 6))
        >>> smooth(net, batch).shape, small(net, batch).shape
        (torch.Size([]), torch.Size([]))
    """

    references: Tensor | None

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        prior: str | Prior = "smoothness",
        references: Tensor | None = None,
        samples: int = 1,
        of: ScalarFunction | None = None,
        wrt: Inputs | None = None,
        multiply: bool = True,
        metric: MetricLike = None,
    ) -> None:
        super().__init__(weight)
        if prior not in ("smoothness", "sparsity") and not callable(prior):
            raise GradregError(f"prior={prior!r}; allowed are 'smoothness', 'sparsity' and a function of attributions.")
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise GradregError(f"samples={samples!r}; it must be a whole number from 1.")
        self.prior = prior
        self.register_buffer("references", references)
        self.samples = samples
        self.of: ScalarFunction = true_logit() if of is None else of
        self.needs_targets = reads_targets(self.of)
        self.wrt = Inputs() if wrt is None else wrt
        self.multiply = multiply
        self.metric = as_metric(metric)
        self.additive = prior == "smoothness"

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the prior's value."""
        _, value = single_input(batch, self.wrt, "AttributionPrior")
        attributions = precise(self.attributions(model, batch))
        rows = attributions.reshape(-1, *value.shape[1:])
        if self.prior == "smoothness":
            return total_variation(rows).mean()
        if self.prior == "sparsity":
            return -2 * gini(rows.abs().mean(0).flatten())
        if not callable(self.prior):
            raise GradregError(f"prior={self.prior!r} is no function.")
        result = self.prior(rows)
        if not isinstance(result, Tensor) or (result.dim() and result.shape != rows.shape[:1]):
            found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise GradregError(f"The prior must return [{rows.shape[0]}] or a scalar, found {found}.")
        return result.mean()

    def attributions(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the expected gradients with graph, `[n, *targets, *shape]`, with heads `[n, K, *targets, *shape]`."""
        name, value = single_input(batch, self.wrt, "AttributionPrior")
        n, references = len(batch), self._references(batch, value)
        k = references.shape[1]
        alpha = drawn(batch, "alpha", (n, k), value, "uniform").to(value)
        difference = value.unsqueeze(1) - references
        points = references + alpha.reshape(n, k, *[1] * (value.dim() - 1)) * difference
        rows = torch.arange(n, device=value.device).repeat_interleave(k)
        kept = {key: extra for key, extra in batch.extras.items() if key not in ("references", "alpha")}
        repeated = Batch(batch.inputs, batch.targets, batch.groups, kept)[rows]  # one forward for all samples
        at = {name: points.flatten(0, 1)}
        found = gradients(model, repeated, self.of, Inputs(name), at=at, differentiable=True)[name]
        if self.metric is not None:
            found = self.metric.shaped(found)
        found = found.reshape(n, k, *found.shape[1:])
        if self.multiply:
            between = found.dim() - difference.dim()
            found = found * difference.reshape(n, k, *[1] * between, *value.shape[1:])
        return found.mean(1)

    def _references(self, batch: Batch, value: Tensor) -> Tensor:
        if "references" in batch.extras:
            given = batch.extra("references", "one set per example")
            fits = given.dim() == value.dim() + 1 and given.shape[2:] == value.shape[1:] and given.shape[1] > 0
            if not fits or not given.is_floating_point():
                raise BatchError(
                    f"batch.extras['references'] is {given.dtype} of shape {tuple(given.shape)}; expected floating point "
                    f"({len(batch)}, k, *{tuple(value.shape[1:])})."
                )
            return given.to(value)
        if self.references is None:
            raise BatchError(
                "AttributionPrior needs references: give a background set, AttributionPrior(references=...), or "
                "batch.extras['references'] of shape [n, k, *shape]."
            )
        if self.references.shape[1:] != value.shape[1:]:
            raise BatchError(
                f"The references are {tuple(self.references.shape)}; the input is {tuple(value.shape)}: the axes behind the "
                "first must agree."
            )
        chosen = torch.randint(len(self.references), (len(batch), self.samples), device=self.references.device)
        return self.references[chosen].to(value)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"prior={self.prior!r}, samples={self.samples}, of={self.of!r}, wrt={self.wrt!r}"
