"""Answers of an index: a table to read, rows to process, a page to look at."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import gradreg as gr
from gradreg.errors import ScalarError
from gradreg.experiments.attribution.examples import label_of, main_input, shown
from gradreg.experiments.page import Card, Question, page
from gradreg.experiments.report import markdown_table
from gradreg.tracin import RowId, Rows, TopK

__all__ = ["answer_page", "as_csv", "as_rows", "as_table"]

_KINDS = (("proponent", "proponents"), ("opponent", "opponents"))


def as_rows(
    top: TopK, tests: Sequence[RowId], trains: Rows, test_rows: Rows, positions: Sequence[int]
) -> list[dict[str, Any]]:
    """Return one row per test and training example, in the order test, kind, rank.

    Args:
        top: The answers.
        tests: Where the tests lie.
        trains: Training examples, for their labels.
        test_rows: Test examples.
        positions: Of the tests among these.
    """
    rows = []
    for test, where in enumerate(tests):
        label = label_of(test_rows.batch([positions[test]]))
        for kind, attribute in _KINDS:
            ranking = getattr(top, attribute)
            for rank, (score, column, place) in enumerate(
                zip(ranking.scores[test].tolist(), ranking.columns[test].tolist(), ranking.rows[test], strict=True),
                start=1,
            ):
                rows.append(
                    {
                        "test_dataset": where.dataset,
                        "test_row": where.row,
                        "test_label": label.removeprefix("label "),
                        "kind": kind,
                        "rank": rank,
                        "dataset": place.dataset,
                        "row": place.row,
                        "label": label_of(trains.batch([column])).removeprefix("label "),
                        "score": score,
                    }
                )
    return rows


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Write rows as CSV with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Write one line per test and kind, the strongest first."""
    lines: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        label = f" ({row['test_label']})" if row["test_label"] else ""
        key = (f"{_place(row['test_dataset'], row['test_row'])}{label}", row["kind"])
        own = f" ({row['label']})" if row["label"] else ""
        lines.setdefault(key, []).append(f"{_place(row['dataset'], row['row'])}{own} {row['score']:+.3g}")
    width = max(map(len, lines.values()))
    header = ["test", "kind", *(str(rank + 1) for rank in range(width))]
    return "\n".join(markdown_table(header, [[*key, *cells] for key, cells in lines.items()]))


def answer_page(
    title: str,
    top: TopK,
    tests: Rows,
    positions: Sequence[int],
    trains: Rows,
    *,
    tracin: gr.TracIn | None = None,
    image_shape: Sequence[int] | None = None,
    decode: Callable[[list[int]], Sequence[str]] | None = None,
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """Write the page of all tests.

    Args:
        title: Of the page.
        top: The answers.
        tests: Test examples.
        positions: Of the tests among these.
        trains: Training examples.
        tracin: Computes scores of tokens for sequences; None leaves tokens unshaded.
        image_shape: See `examples.shown`.
        decode: See `examples.shown`.
        facts: Names and values at the top.
    """

    def card(
        batch: gr.Batch, where: RowId, kind: str, score: float | None = None, tokens: Tensor | None = None
    ) -> Card:
        look = shown(batch, image_shape=image_shape, decode=decode, scores=tokens)
        return Card(f"{kind} row {_place(where.dataset, where.row)}", look, label_of(batch), score)

    questions = []
    for test, position in enumerate(positions):
        answers = []
        for _, attribute in _KINDS:
            ranking = getattr(top, attribute)
            columns, scores = ranking.columns[test].tolist(), ranking.scores[test].tolist()
            examples = _with_token_scores(tracin, trains, columns, tests, position)
            answers.append(
                [
                    card(batch, trains.identity(column), "training", score, shares)
                    for column, score, (batch, shares) in zip(columns, scores, examples, strict=True)
                ]
            )
        questions.append(Question(card(tests.batch([position]), tests.identity(position), "test"), *answers))
    return page(title, questions, facts)


def _with_token_scores(
    tracin: gr.TracIn | None, trains: Rows, columns: Sequence[int], tests: Rows, position: int
) -> list[tuple[gr.Batch, Tensor | None]]:
    """Return training examples, and scores of their tokens where the loss has tokens."""
    alone = [trains.batch([column]) for column in columns]
    if tracin is None or main_input(alone[0]).is_floating_point():
        return [(batch, None) for batch in alone]
    together = trains.batch(columns)
    try:
        scores = tracin.influence(together, tests.batch([position]), per="token")[0]
    except ScalarError:  # one value per example
        return [(batch, None) for batch in alone]
    # with a shift there is one score less than tokens, and each belongs to the token that is predicted
    missing = main_input(together).shape[1] - scores.shape[1]
    scores = torch.nn.functional.pad(scores, (missing, 0), value=torch.nan)
    if "attention_mask" in together.named_inputs():  # tells the padding on either side
        return [(together[place : place + 1], scores[place]) for place in range(len(columns))]
    return [(batch, own[: main_input(batch).shape[1]]) for batch, own in zip(alone, scores, strict=True)]


def _place(dataset: int | str, row: int) -> str:
    return str(row) if dataset == 0 else f"{dataset}[{row}]"
