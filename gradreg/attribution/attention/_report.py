"""What an attention report holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gradreg._files import write_durably
from gradreg.attribution._check import number, plain
from gradreg.attribution.attention._page import page
from gradreg.attribution.attention._plot import plot
from gradreg.attribution.attention._side import AttentionSide
from gradreg.attribution.attention._statistics import QUANTITIES
from gradreg.attribution.attention._store import load, save
from gradreg.attribution.attention._text import side_as_dict, side_as_lines
from gradreg.errors import GradregError, UnknownNameError, closest

__all__ = ["AttentionReport"]


@dataclass(frozen=True, eq=False, repr=False)
class AttentionReport:
    """Attention and its gradients per layer, head and kind of token; made by `attention_report`, which has the formulas.

    Args:
        sides: From name to the maps of one sort.
        of: What was differentiated.
        model: Class of the model.
        examples: How many.
        per: `"example"` or `"batch"`.
        provenance: What made it: versions, dtype, attention implementation, arguments.

    Example:
        >>> import torch, gradreg as gr
        >>> layer = torch.nn.TransformerEncoderLayer(4, nhead=2, dim_feedforward=8, batch_first=True, dropout=0.0)
        >>> net = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> report = gr.attention_report(net, torch.randn(5, 3, 4), gr.logit(0))
        >>> list(report.sides), report.table["self"]["score_gradient"].shape
        (['self'], torch.Size([1, 2, 1]))
    """

    sides: Mapping[str, AttentionSide]
    of: str = ""
    model: str = ""
    examples: int = 0
    per: str = "example"
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "provenance", plain(self.provenance))  # frozen for others

    @property
    def table(self) -> dict[str, dict[str, Tensor]]:
        """From side and quantity to values, `[layers, heads, kinds]` and `[layers, heads, kinds, *targets]`."""
        return {name: dict(side.table) for name, side in self.sides.items()}

    @property
    def targets(self) -> tuple[int, ...]:
        """Shape of the targets; empty for one scalar per example."""
        return tuple(next(iter(self.sides.values())).table["gradient"].shape[3:])

    def get(self, quantity: str, kind: str, side: str | None = None) -> Tensor:
        """Return one quantity for one kind of key, `[layers, heads, *targets]`.

        Args:
            quantity: For example `"gradient"`; see `attention_report`.
            kind: For example `"[SEP]"`.
            side: Which maps; may be left out where there is one sort.

        Raises:
            UnknownNameError: If there is none such.
        """
        found = next(iter(self.sides.values())) if side is None and len(self.sides) == 1 else self.sides.get(str(side))
        if found is None:
            raise UnknownNameError(f"side={side!r}; there are {closest(str(side), self.sides)}.")
        return found.get(quantity, kind)

    def target(self, *index: int) -> AttentionReport:
        """Return the report of one target.

        Args:
            index: A number for every axis of targets.

        Raises:
            GradregError: If there is no such target.
        """
        sizes = self.targets
        if len(index) != len(sizes):
            raise GradregError(f"target{index} does not exist; the axes of targets have the sizes {sizes}.")
        index = tuple(number(one, size, "target") for one, size in zip(index, sizes, strict=True))
        sides = {}
        for name, side in self.sides.items():
            places = (slice(None),) * 3 + index
            cut = {quantity: value if value.dim() == 3 else value[places] for quantity, value in side.table.items()}
            sides[name] = dataclasses.replace(side, table=cut)
        return dataclasses.replace(self, sides=sides, of=f"{self.of}, target {', '.join(map(str, index))}")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, ready for JSON; None where a layer has no pair of a kind."""
        return {**self._about(), "sides": {name: side_as_dict(side) for name, side in self.sides.items()}}

    def save(self, path: str | Path) -> None:
        """Write everything into one safetensors file, which is whole or absent.

        Args:
            path: Ends in `.safetensors`; missing folders are made.

        Raises:
            GradregError: If the name ends otherwise.
        """
        save(Path(path), self.sides, self._about())

    @classmethod
    def load(cls, path: str | Path) -> AttentionReport:
        """Read what `save` wrote, every number as it was; tensors lie on the CPU.

        Args:
            path: Of the file.

        Raises:
            GradregError: If the file is missing, half-written, of another program or of a later version.
        """
        sides, about = load(Path(path))
        return cls(sides, **{name: about[name] for name in ("of", "model", "examples", "per", "provenance")})

    def plot(
        self, path: str | Path | None = None, *, quantities: tuple[str, ...] = QUANTITIES[:2], title: str | None = None
    ) -> Any:
        """Draw the quantities over layers, in the manner of Clark et al. 2019: a dot per head, a line through their mean.

        Args:
            path: Write a PNG there.
            quantities: What to draw, a panel for each.
            title: Above all; None for the model, and f, which was differentiated.

        Returns:
            The matplotlib figure.

        Raises:
            UnknownNameError: If there is no such quantity.
        """
        heading = f"{self.model}, {self.examples} examples{self._counted()}; f: {self.of}" if title is None else title
        return plot(self.sides, None if path is None else Path(path), quantities, heading)

    def to_html(self, path: str | Path | None = None, *, title: str | None = None) -> str:
        """Write a page: a chart over layers and a shaded table of layers and heads for every kind, of what is chosen on it.

        Chosen are the quantity, which maps (encoder, decoder, cross) and the target, or the mean over targets. It is whole in
        itself: no server, no network.

        Args:
            path: Where to write it; None only returns it.
            title: Of the page; None for a plain one.

        Returns:
            The page.

        Raises:
            GradregError: If there are too many numbers for a page.

        Example:
            >>> import torch, gradreg as gr
            >>> layer = torch.nn.TransformerEncoderLayer(4, nhead=2, dim_feedforward=8, batch_first=True, dropout=0.0)
            >>> net = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(12, 2))
            >>> report = gr.attention_report(net, torch.randn(5, 3, 4), gr.logit(0))
            >>> text = report.to_html(title="Heads & layers")
            >>> text.startswith("<!doctype html>"), "<h1>Heads &amp; layers</h1>" in text
            (True, True)
        """
        text = page(self.sides, self._about(), title)
        if path is not None:
            write_durably(Path(path), lambda file: file.write_text(text, encoding="utf-8"))
        return text

    def _counted(self) -> str:
        kinds = self.provenance.get("queries")
        return f", queries {', '.join([kinds] if isinstance(kinds, str) else kinds)} only" if kinds else ""

    def _about(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "of": self.of,
            "examples": self.examples,
            "per": self.per,
            "targets": list(self.targets),
            "provenance": dict(self.provenance),
        }

    def __str__(self) -> str:
        per = "" if self.per == "example" else ", summed over the batch"
        head = f"Attention of {self.model}, {self.examples} examples{self._counted()}; gradients of {self.of}{per}"
        return "\n".join([head, *(line for side in self.sides.values() for line in side_as_lines(side))])

    __repr__ = __str__
