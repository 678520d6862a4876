"""After a call on a model of transformers, all is as before: also when the forward raised."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import collect_factors, point_values
from tests.transformers.tiny import FAMILY, classes, some_loss

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::gradreg.errors.GradregWarning")

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PREDICATES = [
    (module, name)
    for module in ("modeling_utils", "masking_utils", "modeling_attn_mask_utils", "utils.import_utils")
    for name in ("is_tracing", "is_torchdynamo_compiling")
]


def configs(net: nn.Module) -> dict[int, Any]:
    return {id(config): config for m in net.modules() if (config := getattr(m, "config", None)) is not None}


def observed(net: nn.Module, batch: gr.Batch) -> dict[str, Any]:
    tensors = dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers(remove_duplicate=False))
    inputs = {name: value for name, value in batch.inputs.items() if isinstance(value, Tensor)}
    everything = tensors | inputs
    return {
        "objects": {name: id(value) for name, value in everything.items()},
        "types": {name: type(value) for name, value in everything.items()},
        "storage": {name: value.data_ptr() for name, value in everything.items()},
        "versions": {name: value._version for name, value in everything.items()},
        "values": {name: value.detach().clone() for name, value in everything.items()},
        "grad": {
            name: None if value.grad is None else (id(value.grad), value.grad._version)
            for name, value in tensors.items()
        },
        "flags": {name: (value.requires_grad, value.is_leaf) for name, value in everything.items()},
        "train": {name: module.training for name, module in net.named_modules()},
        "hooks": {(name, kind): list(getattr(m, kind)) for name, m in net.named_modules() for kind in HOOKS},
        "modules": {name: id(module) for name, module in net.named_modules(remove_duplicate=False)},
        "attributes": {name: {key: id(value) for key, value in vars(m).items()} for name, m in net.named_modules()},
        "config": [copy.deepcopy(vars(config)) for config in configs(net).values()],
        "attention": [getattr(config, "_attn_implementation", None) for config in configs(net).values()],
        "random": torch.get_rng_state(),
        "function": F.scaled_dot_product_attention,
        "kernels": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
        ),
        "predicates": [vars(sys.modules.get(f"transformers.{module}", torch)).get(name) for module, name in PREDICATES],
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def assert_unchanged(before: dict[str, Any], net: nn.Module, batch: gr.Batch) -> None:
    after = observed(net, batch)
    assert before.pop("random").equal(after.pop("random"))
    values, now = before.pop("values"), after.pop("values")
    assert all(value.equal(now[name]) for name, value in values.items())
    for name, value in before.items():
        assert after[name] == value, name


CALLS: dict[str, Callable[[nn.Module, gr.Batch, Any], object]] = {
    "points": lambda net, batch, of: gr.gradients(net, batch, of, (gr.Embeddings(), gr.AttentionMaps())),
    "points, differentiable": lambda net, batch, of: gr.gradients(
        net, batch, of, (gr.Embeddings(), gr.AttentionMaps()), differentiable=True
    ),
    "factors": lambda net, batch, of: gr.gradients(net, batch, of, gr.Params("*")),
    "vmap": lambda net, batch, of: gr.gradients(net, batch, of, gr.Params("*"), differentiable=True),
    "loop": lambda net, batch, of: gr.gradients(net, batch, of, gr.Params("*"), route="loop"),
    "batch": lambda net, batch, of: gr.gradients(net, batch, of, gr.Params("*"), per="batch"),
    "directional": lambda net, batch, of: gr.directional(
        net, batch, of, gr.Embeddings(), {name: torch.ones(1, 3, 7, 16).double() for name in ("bert.embeddings.word_embeddings",)}
    ),
    "plan": lambda net, batch, of: gr.plan(net, batch, of, gr.Params("*"), differentiable=True),
    "plan, points": lambda net, batch, of: gr.plan(net, batch, of, (gr.Embeddings(), gr.AttentionMaps())),
    "products": lambda net, batch, of: gr.products(net, batch, batch, lambda *given: of(*given).sum(1), gr.Params("*")),
    "factors, collected": lambda net, batch, of: collect_factors(net, batch, of, gr.Params("*")),
    "values": lambda net, batch, of: point_values(net, batch, of, gr.AttentionMaps()),
}  # fmt: skip


@pytest.mark.parametrize("attention", [None, "eager"], ids=["default", "eager"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_left_behind(call: str, train: bool, attention: str | None) -> None:
    family = FAMILY["BERT, classifier"]
    net, batch = family.make(attention).train(train), family.batch()
    net.bert.encoder.layer[1].train(not train)
    net.classifier.weight.grad = torch.ones_like(net.classifier.weight)
    before = observed(net, batch)
    for _ in range(2):
        CALLS[call](net, batch, classes)
        assert_unchanged(dict(before), net, batch)


@pytest.mark.parametrize("name", ["DeBERTa-v2", "T5", "GPT-2", "Mamba"])
def test_nothing_is_left_behind_by_other_ways(name: str) -> None:
    """Softmaxes of the model's own; two embeddings; left padding; no attention."""
    net, batch = FAMILY[name].make(), FAMILY[name].batch(left=name == "GPT-2")
    before = observed(net, batch)
    points = gr.Embeddings() if name == "Mamba" else (gr.Embeddings(), gr.AttentionMaps())
    for _ in range(2):
        gr.gradients(net, batch, classes, points)
        gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True)
        assert_unchanged(dict(before), net, batch)


class FaultError(Exception):
    pass


@pytest.mark.parametrize("after", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_left_behind_by_a_forward_that_raises(call: str, after: int) -> None:
    """In the first, second, ... call of the last attention."""
    family = FAMILY["BERT, classifier"]
    net, batch = family.make(), family.batch()
    counts = {"calls": 0}

    def fault(module: nn.Module, args: Any) -> None:
        counts["calls"] += 1
        if counts["calls"] > after:
            raise FaultError

    net.bert.encoder.layer[1].output.register_forward_pre_hook(fault)
    before = observed(net, batch)
    try:
        CALLS[call](net, batch, classes)
    except FaultError:
        pass
    else:
        assert after  # there are fewer forwards than that
    assert_unchanged(before, net, batch)


def test_t16_in_the_middle_of_a_training_step() -> None:
    """Between a backward and the optimizer's step: the step is the one that it would have been."""
    family = FAMILY["BERT, classifier"]
    batch = family.batch()
    results = []
    for looks in (False, True):
        net = family.make().train()
        optimizer = torch.optim.Adam(net.parameters())
        torch.manual_seed(3)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(**batch.inputs).logits, batch.targets).backward()
            if looks:
                before = observed(net, batch)
                gr.gradients(net, batch, classes, (gr.Embeddings(), gr.AttentionMaps()))
                gr.gradients(net, batch, some_loss, gr.Params("*"), differentiable=True)
                gr.products(net, batch, batch, some_loss, gr.Params("*"))
                assert_unchanged(before, net, batch)
            optimizer.step()
        results.append([parameter.detach().clone() for parameter in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
