"""GradientAlignmentLoss (GAL): ensembles without a common adversarial direction."""

from __future__ import annotations

from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.penalties import coherence
from gradreg.regularizers._heads import HeadComparison


class GradientAlignmentLoss(HeadComparison):
    r"""Coherence of the models' loss gradients, $\frac1n \sum_x \log \sum_{i<j} \exp \cos(\nabla_x L_i, \nabla_x L_j)$.

    A smooth maximum over pairs: the pair that agrees most is pushed hardest. One logarithm per example and a mean over examples,
    as in the paper and in the code of TRS. The variant in sdde takes one logarithm over the whole batch and ordered pairs and
    halves it: that shifts with the logarithm of the batch size and weights examples differently; it is another loss.

    Gradients of a cross-entropy vanish where the data are fitted; eps lets the cosine vanish with them.

    Args:
        weight: A number or schedule, read by `Objective` (0.5 in the paper).
        of: The scalar of every model; cross-entropy unless said otherwise.
        wrt: What the models share: `Inputs()`, or `Features()` of a `SharedBase`.
        metric: The inner product of gradients; see `gr.penalties.Metric`.
        eps: Added to squared norms.

    Raises:
        HeadsError: When called, if there is a single model.

    References:
        Kariyappa, Qureshi, "Improving Adversarial Robustness of Ensembles with Diversity Training", 2019, arXiv 1901.09981.

    Example:
        >>> import torch, gradreg as gr
        >>> from torch import nn
        >>> model = gr.Ensemble([nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)])
        >>> gr.regularizers.GradientAlignmentLoss()(model, (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))).backward()
    """

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean coherence."""
        return coherence(self.head_gradients(model, batch), eps=self.eps)
