"""What cannot be explained, and what is said about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.attribution.similarity._example import read_batch
from gradreg.batch import Batch
from gradreg.engine import head_count
from gradreg.errors import BatchError, CompatibilityError, GradregError, NonFiniteLossError, UnknownNameError
from gradreg.model import parameter_aliases
from gradreg.scalars import is_causal_language_model
from gradreg.wrt import match_names


def chosen_parameters(inner: nn.Module, params: str | tuple[str, ...]) -> dict[str, nn.Parameter]:
    globs = (params,) if isinstance(params, str) else tuple(params) if isinstance(params, (tuple, list)) else ()
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


def check_callables(of: object, tokenizer: object) -> None:
    if of is not None and not callable(of):
        raise GradregError(
            f"of={of!r} is not callable; use loss(fn), ... or a function (outputs, batch) -> [n, targets]."
        )
    if tokenizer is not None and not callable(tokenizer) and not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise GradregError(
            f"tokenizer={tokenizer!r} is a {type(tokenizer).__name__}; allowed are a tokenizer of transformers and a function "
            "from token ids to texts."
        )


def prompt_lengths(prompt: int | tuple[int, int] | None) -> tuple[int, int]:
    pair = (0, 0) if prompt is None else (prompt, prompt) if isinstance(prompt, int) else prompt
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(one, int) and one >= 0 for one in pair):
        raise GradregError(f"prompt={prompt!r}; allowed are a number of tokens, and a pair of them for a and b.")
    return pair


def notes_on(inner: nn.Module, parameters: dict[str, nn.Parameter]) -> list[str]:
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


def read_pair(batch_a: Any, batch_b: Any, inner: nn.Module) -> dict[str, Batch]:
    """Return both batches by the names of their arguments.

    Raises:
        BatchError: If one holds several examples.
        CompatibilityError: If the model has several heads.
    """
    if head_count(inner) is not None:
        raise CompatibilityError(
            f"The model is a {type(inner).__name__} with {head_count(inner)} heads; explain one of its models at a time."
        )
    batches = {"batch_a": read_batch(batch_a, inner, "batch_a"), "batch_b": read_batch(batch_b, inner, "batch_b")}
    for name, batch in batches.items():
        if len(batch) != 1:
            raise BatchError(
                f"{name} holds {len(batch)} examples; one is allowed. Give one row of every tensor (value[:1]; of a Batch, "
                f"{name}[:1]), and others as calibration."
            )
    return batches


def padding_note(inner: nn.Module, batches: Mapping[str, Batch]) -> list[str]:
    """Warn of left padding whose positions the model is not told."""
    notes = []
    for name, batch in batches.items():
        named = batch.named_inputs()
        mask = named.get("attention_mask")
        padded = isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask[:, 0].all())
        if padded and is_causal_language_model(inner) and named.get("position_ids") is None:
            notes.append(
                f"{name} is padded on the left without position_ids; models with a table of positions then see others than "
                "without padding."
            )
    return notes


def check_grams(total: Tensor, counts: tuple[int, int]) -> None:
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
