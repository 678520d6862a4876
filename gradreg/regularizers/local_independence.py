"""LocalIndependence: local independence training (LIT)."""

from __future__ import annotations

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.penalties import MetricLike, pairwise_alignment
from gradreg.regularizers._environments import check_reduction
from gradreg.regularizers._heads import HeadComparison
from gradreg.scalars import ScalarFunction
from gradreg.schedules import Schedule
from gradreg.wrt import Wrt


class LocalIndependence(HeadComparison):
    r"""Squared cosines of the models' input gradients, $\sum_{i<j} \frac1n \sum_x \cos^2(\nabla_x f_i, \nabla_x f_j)$.

    Locally, models whose gradients are orthogonal vary independently of each other. A **sum** over pairs and a mean over
    examples: the expectation of the paper. Its code sums over the batch too (`reduction="sum"`), although its comment says
    average, and adds 1e-6 to the product of squared norms, where here eps is added to each.

    $f_i$ is the cross-entropy here, as in the code for several classes; for a single logit the code takes the logit itself
    (`of=gr.logit(0)`), since its gradient does not vanish where the data are fitted. In two classes the gradient of a
    cross-entropy is parallel to that of the centered logit. `DiverseHeads` is the same comparison of centered top logits at the
    features.

    Args:
        weight: A number or schedule, read by `Objective` (0.01 in the code).
        of: The scalar of every model; cross-entropy unless said otherwise.
        wrt: What the models share: `Inputs()`, or `Features()` of a `SharedBase`.
        metric: The inner product of gradients. The paper's variant on given bases is a low-rank metric.
        reduction: `"mean"` or `"sum"` over examples.
        eps: Added to squared norms.

    Raises:
        GradregError: If a name is unknown.
        HeadsError: When called, if there is a single model.

    References:
        Ross, Pan, Celi, Doshi-Velez, "Ensembles of Locally Independent Prediction Models", AAAI 2020, arXiv 1911.01291.

    Example:
        >>> import torch, gradreg as gr
        >>> from torch import nn
        >>> model = gr.Ensemble([nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)])
        >>> gr.regularizers.LocalIndependence()(model, (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))).backward()
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Wrt | tuple[Wrt, ...] | None = None,
        metric: MetricLike = None,
        reduction: str = "mean",
        eps: float = 1e-12,
    ) -> None:
        super().__init__(weight, of=of, wrt=wrt, metric=metric, eps=eps)
        self.reduction = check_reduction(reduction)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the sum over pairs of squared cosines."""
        total = pairwise_alignment(self.head_gradients(model, batch), "cosine_squared", "sum", self.eps)
        return total / len(batch) if self.reduction == "mean" else total
