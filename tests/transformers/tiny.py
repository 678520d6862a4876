"""Tiny models of transformers, and what autograd says of them when it is used by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.experiments.transformers.families import FAMILIES, Family

FAMILY: dict[str, Family] = {family.name: family for family in FAMILIES}

MAIN = (
    "BERT, token classifier",
    "DistilBERT",
    "GPT-2",
    "Llama",
    "T5",
    "BART",
    "RoBERTa",
    "ModernBERT",
    "ViT",
)
"""Families whose hidden states and maps are compared in full."""


@cache
def model(name: str, attention: str | None = None) -> nn.Module:
    """A model that several tests share: it must be left as it is."""
    return FAMILY[name].make(attention)


def share(name: str) -> float:
    """How far gradients may be apart, as a share of the largest."""
    return 1e-10 if FAMILY[name].exact else 1e-5


def assert_near(found: Tensor, expected: Tensor, share: float, what: str = "") -> None:
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    scale = float(expected.detach().abs().max())
    gap = float((found.detach() - expected.detach()).abs().max())
    assert gap <= share * scale, f"{what}: {gap:.3g} of {scale:.3g}"


def assert_all_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], share: float) -> None:
    """Compare with the largest number of all: what is zero but for rounding has no scale of its own."""
    assert found.keys() == expected.keys()
    scale = max(float(value.detach().abs().max()) for value in expected.values())
    for name, value in expected.items():
        assert found[name].shape == value.shape, (name, found[name].shape, value.shape)
        gap = float((found[name].detach() - value.detach()).abs().max())
        assert gap <= share * scale, f"{name}: {gap:.3g} of {scale:.3g}"


def some_loss(outputs: Any, batch: gr.Batch) -> Tensor:
    """A number per example that reads all visible outputs."""
    z = outputs.logits
    if z.dim() == 2:
        return F.cross_entropy(z, batch.targets, reduction="none")
    mask = batch.named_inputs().get("attention_mask")
    rows = z.log_softmax(-1)[..., :3].square().sum(-1)
    return (rows * mask).sum(1) if mask is not None and mask.shape == rows.shape else rows.sum(1)


def classes(outputs: Any, batch: gr.Batch) -> Tensor:
    """Three logits and their three probabilities: of the example, or of its second position."""
    z = outputs.logits if outputs.logits.dim() == 2 else outputs.logits[:, 1]
    return torch.cat([z[:, :3], z.softmax(-1)[:, :3]], 1)


def run(module: nn.Module, batch: gr.Batch, **more: Any) -> Any:
    return module(**batch.inputs, **more)


def looped(module: nn.Module, batch: gr.Batch, of: Callable[[Any, gr.Batch], Tensor] = some_loss) -> dict[str, Tensor]:
    """Per-example gradients of all parameters, one forward and backward each."""
    named = dict(module.named_parameters())
    rows = []
    for i in range(len(batch)):
        one = batch[i : i + 1]
        rows.append(
            torch.autograd.grad(
                of(run(module, one), one)[0], list(named.values()), allow_unused=True, materialize_grads=True
            )
        )
    return {name: torch.stack([row[position] for row in rows]) for position, name in enumerate(named)}


def by_hand(
    module: nn.Module,
    batch: gr.Batch,
    names: Iterable[str],
    of: Callable[[Any, gr.Batch], Tensor] = classes,
    **more: Any,
) -> tuple[dict[str, Tensor], list[Tensor], Tensor]:
    """Return the gradients at outputs of modules, those at the returned attentions, and the attentions, by hooks of our own."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, output: Any) -> Any:
            several = isinstance(output, tuple)  # beside weights, which have four axes
            place = next(i for i, each in enumerate(output) if each.dim() == 3) if several else 0
            value = output[place] if several else output
            value = value if value.requires_grad else value.detach().requires_grad_()
            key = f"{name}#{sum(known.partition('#')[0] == name for known in seen)}"
            seen[key] = value
            return (*output[:place], value, *output[place + 1 :]) if several else value

        return hook

    handles = [module.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        outputs = run(module, batch, output_attentions=True, **more)
    finally:
        for handle in handles:
            handle.remove()
    maps = attentions(outputs)
    values = of(outputs, batch)
    tensors = [*seen.values(), *maps]
    columns = [
        torch.autograd.grad(values[:, k].sum(), tensors, retain_graph=True, allow_unused=True, materialize_grads=True)
        for k in range(values.shape[1])
    ]
    found = [torch.stack([column[i] for column in columns], 1) for i in range(len(tensors))]
    points = dict(zip(seen, found, strict=False))
    alone = {name.partition("#")[0] for name in points if name.endswith("#1")}
    named = {key if key.partition("#")[0] in alone else key.partition("#")[0]: value for key, value in points.items()}
    return named, found[len(seen) :], maps


def attentions(outputs: Any) -> list[Tensor]:
    """The maps that a model returns, encoder first, and self before cross in every layer of a decoder."""
    if "encoder_attentions" not in outputs:
        return list(outputs.attentions)
    pairs = zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)
    return [*outputs.encoder_attentions, *(each for pair in pairs for each in pair)]
