"""The report: why two gradients differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradreg._files import write_durably
from gradreg.attribution.similarity._advice import recommendation, reduction
from gradreg.attribution.similarity._files import load, save
from gradreg.attribution.similarity._findings import Findings
from gradreg.attribution.similarity._page import page
from gradreg.attribution.similarity._plain import plain
from gradreg.attribution.similarity._plot import plot
from gradreg.attribution.similarity._text import as_text

__all__ = ["SimilarityReport"]


@dataclass(frozen=True, eq=False)
class SimilarityReport(Findings):
    r"""Why the parameter gradients of two examples differ. Made by `explain_similarity`; printed as a short table.

    With token gradients $g_i$ of a and $h_j$ of b and one Gram matrix per group of parameters, everything here is
    $w_a^\top G w_b$ divided by norms: exact, additive over groups and over pairs of tokens.

    Attributes:
        tokens_a: The target tokens of a: text, loss, norm, share of the squared norm.
        tokens_b: Those of b.
        cells: Gram matrices `[tokens_a + tokens_b, tokens_a + tokens_b]` by group and kind of parameter, float64.
        divergence: The first different target with loss and rank on both sides; None where targets are the same or unknown.
        calibration: Comparison with other examples; None without.
        notes: What was done that may surprise.
        provenance: Versions, model, dtype, attention route, group rule, arguments.

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Linear(3, 4)
        >>> pairs = [(torch.randn(1, 3), torch.tensor([label])) for label in (0, 2)]
        >>> r = gr.explain_similarity(net, *pairs)
        >>> abs(float(r.token_pairs.sum()) - r.cosine) < 1e-8, [group.name for group in r.groups]
        (True, ['weight', 'bias'])
    """

    @property
    def reduction(self) -> str:
        """What the mean over tokens, in place of their sum, changes and what not."""
        return reduction(self)

    @property
    def recommendation(self) -> str:
        """What to make of it, in one or two sentences."""
        return recommendation(self)

    def __str__(self) -> str:
        return as_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON; without Gram matrices, which `save` keeps."""
        return plain(self)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file: Gram matrices as tensors, all else as JSON in its metadata.

        Raises:
            GradregError: If the name does not end in `.safetensors`.
        """
        save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> SimilarityReport:
        """Read what `save` wrote.

        Raises:
            GradregError: If the file is missing, damaged, or of something else.
        """
        return cls(**load(Path(path)))

    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> Any:
        """Draw what pairs of tokens add to the cosine beside the cosines of the what-ifs.

        Of more than 40 tokens a side those with the most in the matrix are drawn; all others are one row or column.

        Args:
            path: Write a PNG there.
            title: Above both; None for none.

        Returns:
            The matplotlib figure.

        Example:
            >>> import torch, gradreg as gr
            >>> pairs = [(torch.randn(1, 3), torch.tensor([label])) for label in (0, 2)]
            >>> r = gr.explain_similarity(torch.nn.Linear(3, 4), *pairs)
            >>> [axes.get_title() for axes in r.plot().axes]  # one target a side: no matrix
            ['what if']
        """
        return plot(self, None if path is None else Path(path), title)

    def to_html(
        self, path: str | Path | None = None, *, title: str | None = None, examples: Sequence[str] | None = None
    ) -> str:
        """Write everything as a page: tokens shaded by their share, the matrix over pairs, what-ifs, groups, calibration.

        It is whole in itself: no server, no network, no script.

        Args:
            path: Where to write it; None only returns it.
            title: Of the page; None for a plain one.
            examples: Names of a and b, such as their texts.

        Returns:
            The page.

        Raises:
            GradregError: If examples are not two.

        Example:
            >>> import torch, gradreg as gr
            >>> pairs = [(torch.randn(1, 3), torch.tensor([label])) for label in (0, 2)]
            >>> r = gr.explain_similarity(torch.nn.Linear(3, 4), *pairs)
            >>> text = r.to_html(examples=["first & foremost", "second"])
            >>> text.startswith("<!doctype html>"), "a: first &amp; foremost" in text
            (True, True)
        """
        text = page(self, title, examples)
        if path is not None:
            write_durably(Path(path), lambda file: file.write_text(text, encoding="utf-8"))
        return text
