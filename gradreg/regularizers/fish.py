"""Fish: environments whose gradients point the same way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradreg.batch import Batch
from gradreg.errors import GradregError
from gradreg.penalties import pairwise_alignment
from gradreg.regularizers._environments import EnvironmentForm, environment_gradients, environments
from gradreg.scalars import ScalarFunction
from gradreg.schedules import Schedule
from gradreg.wrt import Wrt


class Fish(EnvironmentForm):
    r"""Minus the inner product of the environments' gradients, $-\frac{2}{E(E-1)} \sum_{e<f} g_e \cdot g_f$.

    $g_e = \nabla_\theta R_e$ of the mean risk of environment e (a value of `batch.groups`), averaged over heads. This is the
    exact objective of gradient matching (IDGM in the paper). The algorithm Fish of the paper and of DomainBed is a first-order
    scheme in the manner of Reptile, which follows this objective for small steps; it takes no derivative of a gradient.

    The inner product has no lower bound: it falls without end where gradients grow. Keep the weight small, or use
    `similarity="cosine"`, which is bounded and not of the paper.

    Args:
        weight: A number or schedule, read by `Objective`.
        of: The risk of one example; cross-entropy unless said otherwise.
        wrt: The parameters.
        similarity: `"dot"` or `"cosine"`.

    Raises:
        GradregError: If a name is unknown, or `wrt` is not of parameters.
        BatchError: When called, if groups are missing or there is a single one.

    References:
        Shi, Seely, Torr, Siddharth, Hannun, Usunier, Synnaeve, "Gradient Matching for Domain Generalization", ICLR 2022,
        arXiv 2104.09937 (the objective IDGM).

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> batch = gr.Batch(torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0]), groups=torch.tensor([0, 0, 0, 1, 1, 1]))
        >>> gr.regularizers.Fish(weight=0.01)(net, batch).backward()
    """

    def __init__(
        self,
        weight: float | Schedule = 1.0,
        *,
        of: ScalarFunction | None = None,
        wrt: Wrt | tuple[Wrt, ...] | None = None,
        similarity: str = "dot",
    ) -> None:
        super().__init__(weight, of, wrt)
        if similarity not in ("dot", "cosine"):
            raise GradregError(f"similarity={similarity!r}; allowed are 'dot' and 'cosine'.")
        self.similarity = similarity

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return minus the mean inner product over pairs of environments."""
        found = environments(batch, "Fish", at_least=2)
        if self.similarity == "cosine":
            rows = torch.cat(environment_gradients(model, batch, self.of, self.wrt), 1)
            return -pairwise_alignment(rows.unsqueeze(0), "cosine")
        count = len(found)
        others = torch.eye(count, dtype=torch.float64) - 1
        return self.form(model, batch, found, others / (count * (count - 1)))

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"of={self.of!r}, wrt={self.wrt!r}, similarity={self.similarity!r}"
