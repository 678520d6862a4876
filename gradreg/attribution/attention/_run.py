"""The attention report: from a model and a batch to statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradreg.attribution._versions import version_of
from gradreg.attribution.attention._collector import Collector
from gradreg.attribution.attention._kinds import Kinds
from gradreg.attribution.attention._names import name_of
from gradreg.attribution.attention._report import AttentionReport
from gradreg.attribution.attention._segments import segments_of
from gradreg.batch import Batch, as_batch
from gradreg.engine import point_records
from gradreg.errors import GradregError
from gradreg.model import check_compatible, unwrap
from gradreg.scalars import ScalarFunction
from gradreg.wrt import AttentionMaps


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
    check_compatible(model, differentiable=differentiable)
    batch = as_batch(batch)
    inner = unwrap(model)
    counted = (queries,) if isinstance(queries, str) else None if queries is None else _names(queries)
    work = Collector(inner, batch, kinds, tokenizer, counted, segments_of(batch, valid))
    work.check()
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
            f"queries={counted!r} leaves no query in any map: tokens of these kinds are padding, or absent."
        )
    return AttentionReport(
        sides,
        of=name_of(of),
        model=type(inner).__name__,
        examples=len(batch),
        per=per,
        provenance=_provenance(inner, batch, layers, counted),
    )


def _names(queries: Any) -> tuple[str, ...]:
    names = tuple(queries) if isinstance(queries, Iterable) else (queries,)
    if not all(isinstance(name, str) for name in names):
        raise GradregError(
            f"queries={queries!r}; allowed are the name of a kind, several of them, and None for all queries."
        )
    return names


def _provenance(inner: nn.Module, batch: Batch, layers: Any, queries: Any) -> dict[str, Any]:
    config = getattr(inner, "config", None)
    parameter = next((one for one in inner.parameters() if one.is_floating_point()), batch.tensors()[0])
    made = {
        "gradreg": version_of("gradreg"),
        "torch": torch.__version__,
        "transformers": version_of("transformers") if config is not None else None,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": parameter.device.type,
        "attention": getattr(config, "_attn_implementation", None),
        "training": inner.training,
        "layers": layers,
        "queries": queries,
    }
    return {key: value for key, value in made.items() if value is not None}
