"""The public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradreg.attribution.similarity._calibration import calibrate, left_out, other_sides, read_others
from gradreg.attribution.similarity._checks import (
    check_callables,
    check_grams,
    chosen_parameters,
    notes_on,
    padding_note,
    prompt_lengths,
    read_pair,
)
from gradreg.attribution.similarity._divergence import divergence_of
from gradreg.attribution.similarity._example import read_examples
from gradreg.attribution.similarity._grams import gram_matrices, token_side
from gradreg.attribution.similarity._groups import Groups, places
from gradreg.attribution.similarity._provenance import provenance_of
from gradreg.attribution.similarity._report import SimilarityReport
from gradreg.attribution.similarity._texts import special_ids, texts_of
from gradreg.attribution.similarity._token_rows import token_rows
from gradreg.attribution.similarity._what_ifs import dropped_weights
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
    check_callables(of, tokenizer)
    bytes_, prompts = as_bytes(memory), prompt_lengths(prompt)
    parameters = chosen_parameters(inner, params)
    placed, rule = places(inner, list(parameters), groups)
    batches = read_pair(batch_a, batch_b, inner)
    notes = [*notes_on(inner, parameters), *padding_note(inner, batches)]
    with torch.inference_mode(False), preserved(inner, devices_of(inner)):
        inner.eval()  # `preserved` gives the flags back
        (a,), (b,) = (read_examples(inner, batch, of, name) for name, batch in batches.items())
        others = [] if calibration is None else read_others(calibration, inner, of)
        special = special_ids(inner, tokenizer, classes=a.classes)
        keys = left_out(a, b, special) if others else {}
        sides = [token_side(a), token_side(b), *other_sides(others, keys)]
        counts = len(a.positions), len(b.positions)
        grams = gram_matrices(inner, sides, sum(counts), parameters, placed, bytes_)
    check_grams(grams.total, counts)
    texts = texts_of(a, inner, tokenizer), texts_of(b, inner, tokenizer)
    tokens_a, tokens_b, index = token_rows((a, b), texts, grams.total, special, prompts)
    weights = {key: (dropped_weights(key, tokens_a), dropped_weights(key, tokens_b)) for key in keys}
    return SimilarityReport(
        tuple(tokens_a),
        tuple(tokens_b),
        grams.cells,
        divergence_of(a, b, tokens_a, tokens_b, index),
        calibrate(grams.total, counts, weights) if others else None,
        tuple(notes),
        provenance_of(inner, a, parameters, rule, params, grams.routes),
    )
