"""The public function."""

from __future__ import annotations

from importlib import metadata
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
from gradreg.attribution.similarity._divergence import divergence_of
from gradreg.attribution.similarity._example import Example, read_batch, read_examples, special_ids, texts_of
from gradreg.attribution.similarity._grams import Side, gram_matrices
from gradreg.attribution.similarity._groups import Groups, places
from gradreg.attribution.similarity._report import SimilarityReport
from gradreg.attribution.similarity._rows import Cell, TokenRow
from gradreg.attribution.similarity._scalar import one_hot_rows
from gradreg.attribution.similarity._what_ifs import compared, dropped_weights
from gradreg.engine import head_count
from gradreg.errors import BatchError, CompatibilityError, GradregError, NonFiniteLossError, UnknownNameError
from gradreg.model import check_compatible, devices_of, parameter_aliases, preserved, unwrap
from gradreg.scalars import ScalarFunction
from gradreg.tracin._memory import as_bytes
from gradreg.wrt import match_names


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
    memory: int | str = "1 GiB",
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
    parameters = _parameters(inner, params)
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
    notes = _notes(inner, parameters)
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
    _check_grams(grams.total, (len(a.positions), len(b.positions)))
    tokens = [
        _rows(one, texts_of(one, inner, tokenizer), grams.total[at, at], ends, specials, length)
        for one, at, length in zip(
            (a, b), (slice(0, len(a.positions)), slice(len(a.positions), rows)), _prompts(prompt), strict=True
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
        _provenance(inner, a, parameters, rule, params, grams.routes),
    )


def _parameters(inner: nn.Module, params: str | tuple[str, ...]) -> dict[str, nn.Parameter]:
    globs = (params,) if isinstance(params, str) else tuple(params)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise GradregError(f"params={params!r}; allowed are a glob such as '**.mlp.**' and a tuple of globs.")
    aliases = parameter_aliases(inner)
    named = dict(inner.named_parameters())
    if not named:
        raise CompatibilityError(f"{type(inner).__name__} has no parameters: there is no gradient to explain.")
    wanted = {aliases[name] for glob in globs for name in match_names(glob, aliases, "parameter")}
    found = {name: parameter for name, parameter in named.items() if name in wanted and parameter.requires_grad}
    if not found:
        raise UnknownNameError(
            f"None of the {len(wanted)} parameters of {type(inner).__name__} that match {', '.join(map(repr, globs))} is "
            "trainable (requires_grad=False, as in quantized models and frozen ones). model.requires_grad_(True) makes them so."
        )
    return found


def _prompts(prompt: int | tuple[int, int] | None) -> tuple[int, int]:
    pair = (0, 0) if prompt is None else (prompt, prompt) if isinstance(prompt, int) else prompt
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(one, int) and one >= 0 for one in pair):
        raise GradregError(f"prompt={prompt!r}; allowed are a number of tokens, and a pair of them for a and b.")
    return pair


def _notes(inner: nn.Module, parameters: dict[str, nn.Parameter]) -> list[str]:
    notes = []
    training = [module for module in inner.modules() if module.training and not list(module.children())]
    random = [m for m in training if "dropout" in type(m).__name__.lower() and getattr(m, "p", True)]
    norms = [m for m in training if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if inner.training or random or norms:
        which = " (it has dropout)" if random else " (it has BatchNorm)" if norms else ""
        notes.append(
            f"The model was in train mode{which}; gradients are those of eval mode, and its flags were left as they were."
        )
    frozen = [name for name, parameter in inner.named_parameters() if not parameter.requires_grad]
    if frozen:
        notes.append(f"{len(frozen)} frozen parameters take no part, such as {frozen[0]}.")
    return notes


def _keys(a: Example, b: Example, ends: frozenset[int], specials: frozenset[int]) -> dict[str, frozenset[int]]:
    """Return what is left out of every calibration example: only what also changes a or b."""
    ids = set(a.ids or ()) | set(b.ids or ())
    keys: dict[str, frozenset[int]] = {AS_GIVEN: frozenset()}
    if ids & ends:
        keys[NO_END] = ends
    if ids & (specials - ends):
        keys[NO_SPECIAL] = specials
    return keys


def _check_grams(total: Tensor, counts: tuple[int, int]) -> None:
    if not bool(torch.isfinite(total).all()):
        raise NonFiniteLossError(
            "A gradient is NaN or infinite although all losses are finite. Look for a square root or logarithm of zero, or a "
            "softmax over nothing (an attention mask without any token)."
        )
    first = counts[0]
    for name, at in (("batch_a", slice(0, first)), ("batch_b", slice(first, sum(counts)))):
        if float(total[at, at].sum()) <= 0:
            raise GradregError(
                f"The gradient of {name} is zero, so it has no direction: the scalar does not depend on the chosen "
                "parameters, or its token gradients cancel."
            )


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


def _provenance(
    inner: nn.Module,
    a: Example,
    parameters: dict[str, nn.Parameter],
    rule: str,
    params: str | tuple[str, ...],
    routes: dict[str, str],
) -> dict[str, Any]:
    config = getattr(inner, "config", None)
    counts: dict[str, int] = {}
    for route in routes.values():
        counts[route] = counts.get(route, 0) + 1
    versions = {}
    for package in ("gradreg", "torch", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    numel = sum(parameter.numel() for parameter in parameters.values())
    return {
        "model": f"{type(inner).__name__}, {numel:,} parameters",
        "dtype": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()})),
        "attention": str(getattr(config, "_attn_implementation", None) or "as in the model"),
        "of": repr(a.of),
        "params": [params] if isinstance(params, str) else list(params),
        "group_rule": rule,
        "gradient_rules": counts,
        "tied": {
            name: [other for other, first in parameter_aliases(inner).items() if first == name and other != name]
            for name in parameters
            if sum(first == name for first in parameter_aliases(inner).values()) > 1
        },
        "versions": versions,
    }
