"""What an attribution returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradreg.attribution import _store
from gradreg.attribution._fields import Fields
from gradreg.attribution._look import Score, as_lines, as_text, named, top
from gradreg.attribution._merge import into_words, with_tokens
from gradreg.attribution._select import select
from gradreg.errors import GradregError

__all__ = ["Attribution", "Score"]


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Fields):
    r"""Scores of sources for targets: how much every token, or every feature, contributed to every output.

    Args:
        by_key: From result key (the module or input that was attributed to) to scores: `[n, *targets, L]` per token, one
            score for each of L positions, `[n, *targets, *shape]` per feature. Units are those of the target.
        method: Name of the function that made it.
        per: `"token"` or `"feature"`.
        change: $f(x) - f(b)$ of every target, `[n, *targets]`; None where there is no baseline.
        delta: The completeness gap, sum of all scores minus `change`, `[n, *targets]`; None where there is no baseline.
        error: Estimated error of the integral, in absolute value, `[n, *targets]`; None where there is none.
        target_axes: A name for every axis of targets, such as `("token", "class")`.
        ids: From key to the token ids `[n, L]`, where sources are tokens.
        valid: From key to which positions are real, `[n, L]`; padded ones have score zero.
        segments: From key to what its tokens are: `"source"`, `"target prefix"`.
        labels: From key to the tokens of every example as text, L for each, where they are known.
        target_labels: From an axis of targets to a name for each, such as those of classes; or to such a list for every
            example, None in it for padding. The axis `"token"` needs none where tokens are known.
        provenance: What made it: versions, dtype, kernel, plan, model class, arguments; kept as JSON has it.

    Raises:
        GradregError: If shapes or keys do not fit together.

    Example:
        >>> import torch, gradreg as gr
        >>> a = gr.Attribution({"inputs": torch.ones(1, 2, 3)}, method="saliency", per="token", target_axes=("class",))
        >>> a.scores.shape
        torch.Size([1, 2, 3])
        >>> print(a)
        Attribution by saliency per token: 1 example, 2 class, 'inputs' [3]
          example 0, class 0: '0' +1, '1' +1, '2' +1
          example 0, class 1: '0' +1, '1' +1, '2' +1
    """

    @property
    def scores(self) -> Tensor:
        """The scores as one tensor; per token those of several keys one after the other along the last axis.

        Raises:
            GradregError: If scores per feature have several keys; take them from `by_key`.
        """
        values = list(self.by_key.values())
        if len(values) == 1:
            return values[0]
        if self.per != "token":
            raise GradregError(f"The scores have the keys {', '.join(map(repr, self.by_key))}; take by_key[...].")
        return torch.cat(values, -1)

    @property
    def relative_delta(self) -> Tensor | None:
        r"""The completeness gap in proportion, $|\delta| / |f(x) - f(b)|$, `[n, *targets]`.

        It is zero where the gap is, infinite where the target did not change but scores do not sum to zero, and None
        where there is no baseline.
        """
        if self.delta is None or self.change is None:
            return None
        gap = self.delta.abs()
        return torch.where(gap == 0, gap, gap / self.change.abs())

    def save(self, path: str | Path) -> None:
        """Write everything into one safetensors file, which is whole or absent.

        Args:
            path: Ends in `.safetensors`; missing folders are made.

        Raises:
            GradregError: If the name ends otherwise.
        """
        _store.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Attribution:
        """Read what `save` wrote, every number as it was; tensors lie on the CPU.

        Args:
            path: Of the file.

        Raises:
            GradregError: If the file is missing, half-written, of another program or of a later version.
        """
        return cls(**_store.load(Path(path)))

    def with_tokens(self, tokenizer: Any) -> Attribution:
        """Return the same scores with labels: tokens as people read them, with the white space that is part of them.

        Args:
            tokenizer: The one that made the ids; any of transformers.

        Raises:
            GradregError: If there are no ids, or they are not in the vocabulary.
        """
        if not self.ids:
            raise GradregError(
                "This attribution has no token ids, so a tokenizer cannot name its positions; set labels."
            )
        return with_tokens(self, tokenizer)

    def words(
        self,
        tokenizer: Any = None,
        *,
        texts: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        offsets: Any = None,
    ) -> Attribution:
        """Return the scores of words, each the sum of the scores of its tokens.

        A word is what white space separates, with signs on their own; an apostrophe between letters and a point between
        digits belong to it. Tokens that share a word are put together, special tokens stay on their own, and padding is
        left out. Examples with fewer words are filled up, which `valid` tells.

        Args:
            tokenizer: The one that made the ids; with it alone words are told by the marks of its tokens.
            texts: What was tokenized: a text, or a pair of texts, per example; with several keys a mapping from key. They
                show what the marks do not, such as whether a space lies before an apostrophe.
            offsets: From key to the tokenizer's offset mapping `[n, L, 2]`, or that of the only key; with `texts`, in the
                place of a tokenizer.

        Raises:
            GradregError: If scores are per feature, something that is needed is missing, or the texts are others.

        Example:
            >>> import torch, gradreg as gr
            >>> a = gr.Attribution({"inputs": torch.tensor([[0.5, 1.0, 2.0]])}, method="saliency", per="token")
            >>> words = a.words(texts=["playing!"], offsets=[[(0, 4), (4, 7), (7, 8)]])
            >>> words.labels["inputs"], words.scores
            ([['playing', '!']], tensor([[1.5000, 2.0000]]))
        """
        return into_words(self, tokenizer, texts, offsets)

    def select(self, axis: str, which: int | Sequence[int]) -> Attribution:
        """Return the part of some examples or targets.

        Args:
            axis: `"example"`, or one of `target_axes`.
            which: Numbers along the axis; a single one removes an axis of targets, as with tensors.

        Raises:
            GradregError: If there is no such axis or number.

        Example:
            >>> import torch, gradreg as gr
            >>> a = gr.Attribution({"inputs": torch.ones(1, 2, 3)}, method="saliency", per="token", target_axes=("class",))
            >>> a.select("class", 1).scores.shape, a.select("class", [1]).scores.shape
            (torch.Size([1, 3]), torch.Size([1, 1, 3]))
        """
        return select(self, axis, which)

    def top(self, k: int = 5, *, example: int = 0, target: int | Sequence[int] = ()) -> list[Score]:
        """Return the sources with the largest scores in absolute value, the largest first.

        Args:
            k: How many; fewer if there are fewer.
            example: Number of the example.
            target: A number for every axis of targets.

        Raises:
            GradregError: If there is no such example or target, or sources have more than one axis.
        """
        return top(self, k, example, target)

    def target_name(self, target: int | Sequence[int], *, example: int = 0) -> str:
        """Return what a target is called, such as `"token 3 (Paris), class 1 (B-LOC)"`.

        Args:
            target: A number for every axis of targets.
            example: Number of the example, whose tokens name the axis `"token"`.

        Raises:
            GradregError: If there is no such example or target.
        """
        return named(self, example, target)

    def plot(self, example: int = 0, target: int | Sequence[int | None] | None = None) -> Any:
        """Draw a matplotlib Figure: bars for one target, a heat map of targets and tokens for all along one axis.

        Args:
            example: Number of the example.
            target: A number for every axis of targets, and None for the axis that the heat map has; None alone where
                there is at most one axis.

        Raises:
            GradregError: If there is no such example or target, or more than one axis is left open.
        """
        from gradreg.attribution._plot import plot

        return plot(self, example, target)

    def to_html(
        self,
        path: str | Path | None = None,
        *,
        title: str | None = None,
        examples: Sequence[str] | None = None,
    ) -> str:
        """Write a page that shows everything: tokens shaded by score, for the target that is chosen on the page.

        It is whole in itself: no server, no network. Scores are rounded to three digits.

        Args:
            path: Where to write it; None only returns it.
            title: Of the page; None for the method's name.
            examples: A heading for each example; None for their numbers.

        Raises:
            GradregError: If sources have more than one axis, or there are too many scores for a page.
        """
        from gradreg._files import write_durably
        from gradreg.attribution._page import page

        text = page(self, title, examples)
        if path is not None:
            write_durably(Path(path), lambda file: file.write_text(text, encoding="utf-8"))
        return text

    def __repr__(self) -> str:
        return as_text(self)

    def __str__(self) -> str:
        return "\n".join([as_text(self), *as_lines(self)])
