"""The public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradreg.attribution.similarity._calibration import (
    AS_GIVEN,
    NO_END,
    NO_SPECIAL,
    calibrate,
    other_sides,
    read_others,
)
from gradreg.attribution.similarity._checks import (
    check_grams,
    chosen_parameters,
    notes_on,
    padding_note,
    prompt_lengths,
)
from gradreg.attribution.similarity._divergence import divergence_of
from gradreg.attribution.similarity._example import Example, read_batch, read_examples
from gradreg.attribution.similarity._grams import Side, gram_matrices
from gradreg.attribution.similarity._groups import Groups, places
from gradreg.attribution.similarity._provenance import provenance_of
from gradreg.attribution.similarity._report import SimilarityReport
from gradreg.attribution.similarity._rows import Cell, TokenRow
from gradreg.attribution.similarity._scalar import one_hot_rows
from gradreg.attribution.similarity._texts import special_ids, texts_of
from gradreg.attribution.similarity._what_ifs import compared, dropped_weights
from gradreg.engine import head_count
from gradreg.errors import BatchError, CompatibilityError
from gradreg.model import check_compatible, devices_of, preserved, unwrap
from gradreg.scalars import ScalarFunction
from gradreg.tracin._memory import as_bytes


def explain_similarity(
    model: nn.Module,
    batch_a: Any,
    batch_b: Any,
    *,
    of: ScalarFunction | None = None,
    params: str | tuple[str, ...] = "*",
    groups: Groups = "auto",
    tokenizer: Any = None,
    calibration: Any = None,
    prompt: int | tuple[int, int] | None = None,
    memory: int | str = "2 GiB",
) -> SimilarityReport:
    r"""Explain why the parameter gradients of two examples are as similar as they are.

    The gradient of an example is the sum of its token gradients, $G_a = \sum_i g_i$, so
    $\cos(G_a, G_b) = \sum_{ij} g_i \cdot h_j / (|G_a| |G_b|)$. One Gram matrix of token gradients is taken per group of
    parameters, from layer factors; the gradients themselves are dropped. Every split and every what-if then is
    $w_a^\top G w_b$ with token weights w: exact, and without another backward. Gradients are those of the model in eval
    mode, whatever its mode; the model is left as it was.

    Args:
        model: A sequence-to-sequence, causal or masked language model, a classifier, or any module with `of`.
        batch_a: One example, as `as_batch` reads it, with labels. A causal language model without labels gets its own tokens.
        batch_b: The other; lengths may differ.
        of: The scalar of an example, `(outputs, batch) -> [n, targets]`; a loss over tokens is taken per token. None: the
            cross-entropy of every token (shifted for causal language models), or of the example for a classifier.
        params: Globs of the parameters.
        groups: `"auto"` (embeddings, norms, attention and MLP in ranges of layers), a mapping from group to globs, or a
            function from the name of a parameter to its group. A tied parameter is in one group, with the sum over its uses.
        tokenizer: For texts and special tokens: a tokenizer of transformers, or a function from ids to texts.
        calibration: Other examples, a batch of k or a list of batches, to say whether the cosine is high.
        prompt: How many tokens at the beginning of the labels are the prompt, for both or for each; for the what-if that
            masks it.
        memory: About how many bytes gradients may take, `"500 MB"` or a number. Less memory takes more passes.

    Returns:
        The report; `print` it, or read `cosine`, `token_pairs`, `groups`, `what_ifs`, ...

    Raises:
        GradregError: If a batch holds more than one example, no target that counts, or unknown tokens (`BatchError`), a loss
            or gradient is not finite or zero, nothing is trainable, or an argument does not fit.

    References:
        Pruthi, Liu, Sundararajan, Kale 2020, arXiv 2002.08484 (inner products of example gradients).

    Example:
        >>> import torch, gradreg as gr
        >>> net = torch.nn.Linear(3, 4)
        >>> pairs = [(torch.randn(1, 3), torch.tensor([label])) for label in (0, 2)]
        >>> r = gr.explain_similarity(net, *pairs)
        >>> list(r.what_ifs), r.token_pairs.shape
        (['as given'], torch.Size([1, 1]))
    """
    check_compatible(model, differentiable=False)
    inner = unwrap(model)
    bytes_ = as_bytes(memory)
    parameters = chosen_parameters(inner, params)
    placed, rule = places(inner, list(parameters), groups)
    if head_count(inner) is not None:
        raise CompatibilityError(
            f"The model is a {type(inner).__name__} with {head_count(inner)} heads; explain one of its models at a time."
        )
    named = {"batch_a": read_batch(batch_a, inner, "batch_a"), "batch_b": read_batch(batch_b, inner, "batch_b")}
    for name, batch in named.items():
        if len(batch) != 1:
            raise BatchError(
                f"{name} holds {len(batch)} examples; one is allowed. Slice it ({name}[:1]), and give others as calibration."
            )
    notes = [*notes_on(inner, parameters), *padding_note(inner, named)]
    with torch.inference_mode(False), preserved(inner, devices_of(inner)):
        inner.eval()  # `preserved` gives the flags back
        (a,), (b,) = (read_examples(inner, batch, of, name) for name, batch in named.items())
        ends, specials = special_ids(inner, tokenizer)
        if a.classes:
            ends = specials = frozenset()
        others = [] if calibration is None else read_others(calibration, inner, of)
        sides = [
            Side(one.batch, (0,) * len(one.positions), one_hot_rows(list(one.positions), one.values.numel()), one.of,
                 one.output_bytes)
            for one in (a, b)
        ]  # fmt: skip
        keys = _keys(a, b, ends, specials) if others else {}
        cells = {name: f"{place.group}\n{place.kind}" for name, place in placed.items()}
        rows = len(a.positions) + len(b.positions)
        grams = gram_matrices(inner, [*sides, *other_sides(others, keys)], rows, parameters, cells, bytes_)
    check_grams(grams.total, (len(a.positions), len(b.positions)))
    tokens = [
        _rows(one, texts_of(one, inner, tokenizer), grams.total[at, at], ends, specials, length)
        for one, at, length in zip(
            (a, b), (slice(0, len(a.positions)), slice(len(a.positions), rows)), prompt_lengths(prompt), strict=True
        )
    ]
    tokens_a, tokens_b, index = compared(*tokens)
    if a.classes:
        tokens_a, tokens_b = tokens
    return SimilarityReport(
        tuple(tokens_a),
        tuple(tokens_b),
        tuple(_cells(grams.cells, cells, parameters)),
        divergence_of(a, b, tokens_a, tokens_b, index),
        calibrate(
            grams.total,
            (len(tokens_a), len(tokens_b)),
            {key: (dropped_weights(key, tokens_a), dropped_weights(key, tokens_b)) for key in keys},
        )
        if others
        else None,
        tuple(notes),
        provenance_of(inner, a, parameters, rule, params, grams.routes),
    )


def _keys(a: Example, b: Example, ends: frozenset[int], specials: frozenset[int]) -> dict[str, frozenset[int]]:
    """Return what is left out of every calibration example: only what also changes a or b."""
    ids = set(a.ids or ()) | set(b.ids or ())
    keys: dict[str, frozenset[int]] = {AS_GIVEN: frozenset()}
    if ids & ends:
        keys[NO_END] = ends
    if ids & (specials - ends):
        keys[NO_SPECIAL] = specials
    return keys


def _rows(
    example: Example,
    texts: list[str],
    gram: Tensor,
    ends: frozenset[int],
    specials: frozenset[int],
    prompt: int,
) -> list[TokenRow]:
    shares, norms = (gram.sum(1) / gram.sum()).tolist(), gram.diagonal().clamp(min=0).sqrt().tolist()
    ids = example.ids or (None,) * len(example.positions)
    # positions are those of the scalar's targets; labels of a causal model lie one further
    offset = example.offset
    return [
        TokenRow(
            place + offset,
            one,
            text,
            loss,
            norm,
            share,
            end=one in ends,
            special=one in specials,
            prompt=place + offset < prompt,
        )
        for place, one, text, loss, norm, share in zip(
            example.positions, ids, texts, example.losses, norms, shares, strict=True
        )
    ]


def _cells(grams: dict[str, Tensor], cells: dict[str, str], parameters: dict[str, nn.Parameter]) -> list[Cell]:
    found = []
    for key, gram in grams.items():
        names = tuple(name for name in parameters if cells[name] == key)
        group, _, kind = key.rpartition("\n")
        found.append(Cell(group, kind, names, sum(parameters[name].numel() for name in names), gram))
    return found
