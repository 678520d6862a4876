"""Right for the right reasons on decoy digits: a patch that tells the label in training and nothing in the test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import gradreg as gr
from gradreg.experiments.reproducible import seed_everything
from gradreg.experiments.studies._digits import accuracy, digits, epochs
from gradreg.experiments.studies._study import BASELINE, METHOD, REFERENCE, Outcome, Scores, Study, fit, mlp

__all__ = ["RRRDecoyDigits"]

PLAIN, RRR, ORACLE = "decoys, no penalty", "decoys, RRR", "random patches (oracle)"
_SIDE = 2  # of the patch, in pixels
_SHOWN, _STRIDE = 6, 90  # images of the figure: so many, so far apart (they are sorted by digit)
_CORNERS = ((0, 0), (0, 8 - _SIDE), (8 - _SIDE, 0), (8 - _SIDE, 8 - _SIDE))


@dataclass(frozen=True)
class RRRDecoyDigits(Study):
    """Decoy MNIST of Ross et al. with the digits of scikit-learn.

    A patch of 2 x 2 pixels in a random corner has a gray value that encodes the digit in training, 1 - digit / 10, and a
    random one of these values in validation and test. The mask covers the patch of every training image. The oracle is
    trained with random gray values.

    Args:
        weight: Weight of the penalty.
        steps: Optimizer steps.
        batch_size: Examples per step.
        width: Hidden units per layer.
        learning_rate: Of Adam.
    """

    columns: ClassVar[str] = (
        "Accuracy on test images whose patch tells the label (decoys), on validation and on test images whose patch is random; "
        "share of the absolute input gradient that lies on the patch. The default weight is the one with the best accuracy on "
        "the validation images, whose patches are random as in the test: a choice with side information."
    )
    claim: ClassVar[str] = (
        "Ross, Hughes, Doshi-Velez 2017 (arXiv 1703.03717): with decoys a network learns the patch and fails where "
        "it says nothing; without gradients at the patch it learns the digit, nearly as well as if there were no decoys."
    )
    criterion: ClassVar[str] = "on random patches RRR is 0.1 better than no penalty and at most 0.05 below the oracle"
    metric: ClassVar[tuple[str, str]] = (RRR, "test")
    _from_zero: ClassVar[tuple[str, ...]] = ("weight",)

    weight: float = 1.0
    steps: int = 500
    batch_size: int = 128
    width: int = 64
    learning_rate: float = 0.002

    def run(self, seed: int) -> Outcome:
        """Train with and without the penalty, and the oracle."""
        data, random = digits(seed), torch.Generator().manual_seed(seed)
        encoded, blind = (
            {kind: _decoys(images, labels, chance, random) for kind, (images, labels) in data.items()}
            for chance in (False, True)
        )
        scores: Scores = {}
        gradients = {}
        for arm in (PLAIN, RRR, ORACLE):
            seed_everything(seed)
            inputs, mask = (blind if arm == ORACLE else encoded)["train"]
            examples = gr.Batch(inputs, data["train"][1], extras={"mask": mask})
            penalty = gr.regularizers.RightForRightReasons(self.weight)
            objective = gr.Objective(F.cross_entropy, **({"reasons": penalty} if arm == RRR else {}))
            model = mlp(64, self.width, 10, nn.Softplus)
            optimizer = torch.optim.Adam(model.parameters(), lr=self.learning_rate)
            fit(model, objective, epochs(examples, self.batch_size, self.steps, seed), optimizer)
            shown = gr.Batch(encoded["test"][0], data["test"][1])
            found = gr.gradients(model, shown, of=gr.scalars.total_log_probability(), wrt=gr.Inputs())["inputs"].abs()
            share = (found * encoded["test"][1]).flatten(1).sum(1) / found.flatten(1).sum(1)
            scores[arm] = {
                "decoys": accuracy(model, encoded["test"][0], data["test"][1]),
                "validation": accuracy(model, blind["validation"][0], data["validation"][1]),
                "test": accuracy(model, blind["test"][0], data["test"][1]),
                "gradient on patch": float(share.mean()),
            }
            gradients[arm] = found[::_STRIDE][:_SHOWN].tolist()
        return Outcome(scores, {"images": encoded["test"][0][::_STRIDE][:_SHOWN].tolist(), "gradients": gradients})

    def reproduced(self, scores: Scores) -> bool:
        """Tell whether the penalty makes up for the decoys."""
        own = scores[RRR]["test"]
        return own > scores[PLAIN]["test"] + 0.1 and own > scores[ORACLE]["test"] - 0.05

    def draw(self, results: Mapping[str, Any]) -> Figure:
        """Bars of accuracy, and where the gradients of one seed are."""
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=(1, 1.1))
        axes, columns = left.subplots(), ("decoys", "test")
        arms = {PLAIN: BASELINE, RRR: METHOD, ORACLE: REFERENCE}
        for number, (arm, color) in enumerate(arms.items()):
            values = np.array([results["scores"][arm][column] for column in columns])  # [columns, seeds]
            positions = np.arange(len(columns)) + 0.27 * (number - 1)
            axes.bar(positions, values.mean(1), 0.25, color=color, label=arm)
            axes.plot(positions, values, ".", color="#222222", markersize=4)
        axes.set(xticks=range(len(columns)), ylim=(0, 1.02), ylabel="test accuracy")
        axes.set_xticklabels(["the patch tells the label", "the patch is random"])
        axes.spines[["top", "right"]].set_visible(False)
        left.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        details = results["details"][str(results["seeds"][0])]
        pictures = {"image": details["images"], **details["gradients"]}
        grid = right.subplots(len(pictures), len(details["images"]), squeeze=False)
        for row, (name, images) in zip(grid, pictures.items(), strict=True):
            for place, image in zip(row, images, strict=True):
                place.imshow(image, cmap="gray" if name == "image" else "magma")
                place.set(xticks=[], yticks=[])
            row[0].set_ylabel(name.replace(", ", ",\n").replace(" (", "\n("), fontsize=7)
        right.suptitle("test images, and size of the gradients there", fontsize=10)
        return figure


def _decoys(images: Tensor, labels: Tensor, blind: bool, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images with patches, and masks that are true on them."""
    shown = torch.randint(10, labels.shape, generator=random) if blind else labels
    corners = torch.tensor(_CORNERS)[torch.randint(len(_CORNERS), labels.shape, generator=random)]
    offset = torch.arange(8)
    rows, columns = ((offset >= c[:, None]) & (offset < c[:, None] + _SIDE) for c in corners.unbind(1))
    mask = rows[:, :, None] & columns[:, None, :]
    return torch.where(mask, (1 - shown / 10)[:, None, None].to(images), images), mask
