"""The attention report: from a model and a batch to statistics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.attribution.attention._kinds import ALL, Kinds, check_names, kinds_of
from gradreg.attribution.attention._names import name_of
from gradreg.attribution.attention._report import AttentionReport
from gradreg.attribution.attention._segments import Segment, Side, segments_of, side_of
from gradreg.attribution.attention._side import AttentionSide
from gradreg.attribution.attention._statistics import Sums, sums
from gradreg.batch import Batch, as_batch
from gradreg.engine import PointRecord, point_records
from gradreg.errors import BatchError, GradregError
from gradreg.model import unwrap
from gradreg.scalars import ScalarFunction, is_causal_language_model
from gradreg.wrt import AttentionMaps

_ORDER = ("self", "encoder", "decoder", "cross")


def attention_report(
    model: nn.Module,
    batch: Any,
    of: ScalarFunction,
    *,
    layers: int | tuple[int, ...] | str | None = None,
    kinds: Kinds = None,
    tokenizer: Any = None,
    queries: str | Iterable[str] | None = None,
    valid: Tensor | Mapping[str, Tensor] | None = None,
    per: str = "example",
    differentiable: bool = False,
    chunk_size: int | None = None,
) -> AttentionReport:
    r"""How much attention goes to every kind of token, and what the gradient says of it, per layer and head.

    Let $A_{qk}$ be the weight that query q gives to key k in one example, layer and head, $G_{qk} = \partial\,\mathrm{of} /
    \partial A_{qk}$, and $\bar G_q = \sum_k A_{qk} G_{qk}$. Averages go over the real queries q of all examples, and over the
    keys k of a kind c that q sees (|c| pairs in all). Hidden keys, with $A_{qk} = 0$, padded keys and padded queries count
    nowhere: a hidden key has a gradient as large as others, of a change that the mask forbids.

    | quantity | of head and kind | unit |
    |---|---|---|
    | `attention` | mean over q of $\sum_{k \in c} A_{qk}$ | share, 0 to 1 |
    | `gradient` | mean over pairs of $\lvert G_{qk} \rvert$ | of per unit of weight |
    | `signed_gradient` | mean over pairs of $G_{qk}$ | the same |
    | `centered_gradient` | mean over pairs of $\lvert G_{qk} - \bar G_q \rvert$ | the same |
    | `score_gradient` | mean over pairs of $\lvert A_{qk} (G_{qk} - \bar G_q) \rvert$ | of per unit of score (nats) |
    | `weighted_gradient` | mean over q of $\sum_{k \in c} A_{qk} G_{qk}$ | of |
    | `joint_score_gradient` | mean over q of $\sum_{k \in c} A_{qk} (G_{qk} - \bar G_q)$ | of per unit of score |

    `attention` and `gradient` are the quantities of Clark et al. 2019 (their figures 2 and 3). A row of A sums to one, so the
    same number added to a row of G changes nothing that can happen: `centered_gradient` is free of it. The derivative by the
    scores in front of the softmax is $A (G - \bar G)$: `score_gradient`. `joint_score_gradient` answers what happens when a
    query's scores to all keys of a kind are raised together. Over kinds that share all keys among them, `attention` sums to
    one and `joint_score_gradient` to zero. Absolute values are taken before any average.

    Args:
        model: Any model whose attention can be reached, under its default attention; see `AttentionMaps`.
        batch: As in `gradients`.
        of: What is differentiated, as in `gradients`: a loss per example, a logit, or several, `[n, *targets]`.
        layers: Which layers, as in `AttentionMaps`.
        kinds: From name to mask `[n, L]`; where encoder and decoder read different sequences, from `"source"` and `"target"` to
            such a mapping; or a function of the token ids that returns one. None: those that the tokenizer tells (special
            tokens by name, punctuation, other; of causal language models also the first token where it is not special, which
            draws attention as [CLS] and [SEP] do), without one a single kind, `"all"`.
        tokenizer: The one that made the ids; any of transformers.
        queries: Count only queries of these kinds.
        valid: Real positions `[n, L]`, or by sequence; by default those of the attention masks, and of decoders without one
            what stands before labels that are ignored to the end.
        per: `"example"`: G is the gradient of each example's own scalar. `"batch"`: that of their sum, for losses in which
            examples depend on each other, such as contrastive ones.
        differentiable: Keep the graph from the report's tensors to the parameters.
        chunk_size: Examples at a time.

    Raises:
        BatchError: If masks do not fit the batch.
        CompatibilityError: If attention cannot be reached.
        CoupledExamplesError: If scalars mix examples and `per` is `"example"`.
        UnknownNameError: If there is no such layer.
        GradregError: If there is no such kind, or no query is left.

    References:
        Clark, Khandelwal, Levy, Manning (2019), What Does BERT Look At?, arXiv:1906.04341, section 3.2.
        Xiao, Tian, Chen, Han, Lewis (2023), Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453.

    Example:
        >>> import torch, gradreg as gr
        >>> layer = torch.nn.TransformerEncoderLayer(4, nhead=2, dim_feedforward=8, batch_first=True, dropout=0.0)
        >>> net = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> first = torch.tensor([[True, False, False]] * 5)
        >>> report = gr.attention_report(net, torch.randn(5, 3, 4), gr.logit(0), kinds={"first": first, "rest": ~first})
        >>> report.get("gradient", "first").shape  # layers, heads
        torch.Size([1, 2])
        >>> bool((report.get("attention", "first") + report.get("attention", "rest") - 1).abs().max() < 1e-5)
        True
    """
    batch = as_batch(batch)
    inner = unwrap(model)
    work = _Work(inner, batch, kinds, tokenizer, queries, segments_of(batch, valid))
    parts = point_records(
        model,
        batch,
        of,
        AttentionMaps(layers),
        work.summed,
        per=per,
        differentiable=differentiable,
        chunk_size=chunk_size,
    )
    totals = {key: sum((part[key] for part in parts[1:]), start=parts[0][key]) for key in parts[0]}
    sides = work.sides(totals)
    if not sides:
        raise GradregError(
            f"queries={queries!r} leaves no query in any map: tokens of these kinds are padding, or absent."
        )
    return AttentionReport(
        sides,
        of=name_of(of),
        model=type(inner).__name__,
        examples=len(batch),
        per=per,
        provenance={
            "dtype": str(next((tensor.dtype for tensor in inner.parameters() if tensor.is_floating_point()), "")),
            "attention": getattr(getattr(inner, "config", None), "_attn_implementation", None),
            "training": inner.training,
            "layers": layers,
            "queries": None if queries is None else [queries] if isinstance(queries, str) else list(queries),
            "versions": {name: _version(name) for name in ("gradreg", "torch", "transformers")},
        },
    )


class _Work:
    """Reads records of maps with the kinds of their tokens."""

    def __init__(
        self, inner: nn.Module, batch: Batch, kinds: Kinds, tokenizer: Any, queries: Any, segments: dict[str, Segment]
    ) -> None:
        self.inner, self.batch, self.queries, self.segments = inner, batch, queries, segments
        self.kinds, self.tokenizer = kinds, tokenizer
        self.causal = is_causal_language_model(inner)
        self.side: dict[str, Side] = {}
        self._masks: dict[str, dict[str, Tensor]] = {}

    def summed(self, record: PointRecord) -> dict[str, Sums]:
        """Return the sums of every map."""
        for key in record.points:
            self.side.setdefault(key, side_of(key, self.inner, self.batch))
        return {
            key: self._one(key, weights, record.gradients[key], record.rows) for key, weights in record.points.items()
        }

    def _one(self, key: str, weights: Tensor, gradient: Tensor, rows: slice) -> Sums:
        side = self.side[key]
        counted = self._real(key, side.queries, weights.shape[2], weights.device)
        keys = self._real(key, side.keys, weights.shape[3], weights.device)
        masks = self.masks(side.keys)
        if self.queries is not None:
            own = self.masks(side.queries)
            chosen = [own[name] for name in self._wanted() if name in own]
            self._check_length(key, side.queries, weights.shape[2], *chosen)
            counted = counted & (torch.stack(chosen).any(0) if chosen else torch.zeros_like(counted))
        self._check_length(key, side.keys, weights.shape[3], *masks.values())
        members = torch.stack(list(masks.values())) if masks else torch.ones_like(keys)[None]
        return sums(weights, gradient, members[:, rows].to(weights.device), counted[rows], keys[rows])

    def masks(self, name: str) -> dict[str, Tensor]:
        """Return the kinds of a segment; none where it has but one."""
        if name not in self._masks:
            several = len({own for side in self.side.values() for own in (side.queries, side.keys)}) > 1
            segment = self.segments[name]
            self._masks[name] = kinds_of(
                segment, self.kinds, self.tokenizer, len(self.batch), several=several, causal=self.causal
            )
        return self._masks[name]

    def sides(self, totals: dict[str, Sums]) -> dict[str, AttentionSide]:
        """Return the report's parts, in which layers have as many heads, in order of the layers."""
        groups: dict[tuple[str, int], list[str]] = {}
        for key, total in totals.items():
            groups.setdefault((self.side[key].name, len(total.queries)), []).append(key)
        found = {}
        for name in (*_ORDER,):
            same = [(heads, keys) for (own, heads), keys in groups.items() if own == name]
            for heads, keys in same:
                keys = [key for key in sorted(keys, key=_numbers) if bool(totals[key].queries.any())]
                if keys:
                    title = name if len(same) == 1 else f"{name}, {heads} heads"
                    found[title] = self._side(title, keys, totals)
        return found

    def _side(self, title: str, keys: list[str], totals: dict[str, Sums]) -> AttentionSide:
        names = list(self.masks(self.side[keys[0]].keys)) or [ALL]
        pairs = torch.stack([totals[key].pairs for key in keys])
        there = [place for place in range(len(names)) if bool(pairs[:, :, place].any())]
        means = [totals[key].means() for key in keys]
        return AttentionSide(
            title,
            _layers(keys),
            tuple(keys),
            tuple(names[place] for place in there),
            tuple(name for place, name in enumerate(names) if place not in there),
            {name: torch.stack([mean[name][:, there] for mean in means]) for name in means[0]},
            pairs[:, :, there],
            torch.stack([totals[key].queries for key in keys]),
        )

    def _wanted(self) -> tuple[str, ...]:
        names = dict.fromkeys(name for side in self.side.values() for name in self.masks(side.queries))
        return check_names(self.queries, list(names))

    def _real(self, key: str, segment: str, length: int, device: torch.device) -> Tensor:
        valid = self.segments[segment].valid
        if valid is None:
            return torch.ones(len(self.batch), length, dtype=torch.bool, device=device)
        self._check_length(key, segment, length, valid)
        return valid.to(device)

    def _check_length(self, key: str, segment: str, length: int, *masks: Tensor) -> None:
        for mask in masks:
            if mask.shape[1] != length:
                raise BatchError(
                    f"The map {key!r} has {length} positions along the {segment}, the masks and ids of the batch "
                    f"{mask.shape[1]}: the model adds or leaves out some. Give kinds and valid as masks [n, {length}]."
                )


def _numbers(key: str) -> tuple[int, ...]:
    """Sort by the numbers in a module's name, then by call; the order of hooks is no order of layers."""
    return tuple(int(number) for number in re.findall(r"(?<=[.#])\d+|^\d+", key))


def _layers(keys: list[str]) -> tuple[int, ...]:
    """Return the numbers of layers: the first in a module's name, or where layers share a module its calls, or the place."""
    for pattern in (r"(?:^|\.)(\d+)(?:[.:])", r"#(\d+)$"):
        found = [int(match.group(1)) for key in keys if (match := re.search(pattern, key))]
        if len(set(found)) == len(keys):
            return tuple(found)
    return tuple(range(len(keys)))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
