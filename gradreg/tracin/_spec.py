"""All that decides the scores besides the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from gradreg.scalars import ScalarFunction
from gradreg.tracin._projection import Projection
from gradreg.tracin.checkpoints import Checkpoint
from gradreg.wrt import Params

__all__ = ["Spec"]


@dataclass(frozen=True)
class Spec:
    """What a `TracIn` was made of, checked; see there.

    Attributes:
        model: The model.
        of: The training loss.
        test_of: The test loss.
        checkpoints: In their order.
        wrt: Globs of parameters.
        selected: Names of the parameters that they match.
        normalize: False, `"cosine"` or `"relatif"`.
        update: `"gradient"` or `"optimizer"`.
        projection: A projection, or None.
        show_progress: Whether to show a progress bar.
    """

    model: nn.Module
    of: ScalarFunction
    test_of: ScalarFunction
    checkpoints: tuple[Checkpoint, ...]
    wrt: tuple[Params, ...]
    selected: tuple[str, ...]
    normalize: Literal[False, "cosine", "relatif"]
    update: Literal["gradient", "optimizer"]
    projection: Projection | None
    show_progress: bool
