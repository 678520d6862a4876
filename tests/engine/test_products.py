"""The door `products`, and what the factors behind it promise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import collect_factors
from gradreg.errors import CoupledExamplesError, GradregError, UnknownNameError

LOSS = gr.loss(F.cross_entropy)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def batch(n: int, seed: int = 0) -> gr.Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return gr.Batch(inputs, torch.randint(0, 3, (n,), generator=generator))


def flat(model: nn.Module, data: gr.Batch, of: Any = LOSS) -> Tensor:
    found = gr.gradients(model, data, of, gr.Params("*"), route="loop")
    return torch.cat([value.flatten(1) for value in found.values()], 1)


def test_values_and_chunks() -> None:
    model, a, b = network(), batch(7), batch(3, 1)
    expected = flat(model, a) @ flat(model, b).T
    for chunk_size in (None, 1, 3, 100):
        found = gr.products(model, a, b, LOSS, gr.Params("*"), chunk_size=chunk_size)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_another_scalar_on_the_other_side() -> None:
    model, a, b = network(), batch(4), batch(3, 1)
    found = gr.products(model, a, b, LOSS, gr.Params("*"), of_b=gr.true_logit())
    torch.testing.assert_close(found, flat(model, a) @ flat(model, b, gr.true_logit()).T, rtol=1e-12, atol=1e-14)


def test_rows_of_targets() -> None:
    model, a = network(), batch(4)
    factors = collect_factors(model, a, gr.all_logits(), gr.Params("*"), each_target=True)
    assert (len(factors), factors.targets) == (12, (3,))
    truth = gr.gradients(model, a, gr.all_logits(), gr.Params("*"), route="loop")
    rows = torch.cat([value.flatten(2) for value in truth.values()], 2).flatten(0, 1)
    torch.testing.assert_close(factors.dot(factors), rows @ rows.T, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(factors.squared_norms(), rows.square().sum(1), rtol=1e-12, atol=1e-14)


def test_a_selection_of_parameters() -> None:
    model, a = network(), batch(4)
    factors = collect_factors(model, a, LOSS, gr.Params("3.*"))
    assert factors.names == ("3.weight", "3.bias")
    left_out = {row.name: row.reason for row in factors.coverage if row.rule is None}
    assert left_out == dict.fromkeys(("0.weight", "0.bias", "2.weight", "2.bias"), "not among wrt")
    with pytest.raises(GradregError, match="different parameters"):
        factors.dot(collect_factors(model, a, LOSS, gr.Params("0.*")))
    with pytest.raises(UnknownNameError, match=r"3\.weight"):
        factors.gradient("3.weigth")


def test_permutation_and_duplicates() -> None:
    model, a = network(), batch(5)
    order = [3, 1, 4, 0, 2, 3]
    whole = gr.products(model, a, a, LOSS, gr.Params("*"))
    found = gr.products(model, a[order], a, LOSS, gr.Params("*"))
    torch.testing.assert_close(found, whole[order], rtol=1e-12, atol=1e-14)


def test_a_layer_that_is_called_for_some_batches_only() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.always(x)
            return out + self.sometimes(x) if float(x.detach().max()) > 50 else out

    model, quiet = Sometimes().double(), batch(4)
    loud = gr.Batch(torch.cat([quiet.inputs, torch.full((1, 4), 60.0).double()]), torch.tensor([0, 1, 2, 0, 1]))
    everything = [gr.products(model, quiet, quiet, LOSS, gr.Params("*"))]
    rows = flat(model, quiet)
    torch.testing.assert_close(everything[0], rows @ rows.T, rtol=1e-12, atol=1e-14)
    with pytest.raises(CoupledExamplesError):  # whether an example meets the layer depends on its neighbors
        gr.products(model, loud[[4, 0, 1]], quiet, LOSS, gr.Params("*"))


def test_low_precision_is_accumulated_in_single() -> None:
    model, a = network().bfloat16(), batch(4)
    low = gr.Batch(a.inputs.bfloat16(), a.targets)
    assert gr.products(model, low, low, LOSS, gr.Params("*")).dtype is torch.float32
    assert gr.gradients(model, low, LOSS, gr.Params("*"))["0.weight"].dtype is torch.bfloat16


def test_norms_of_half_precision_do_not_overflow() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(100))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    batch_of_300 = gr.Batch(torch.full((2, 100), 300.0).half())
    model = nn.Sequential(Scale(), nn.Flatten()).half()
    factors = collect_factors(model, batch_of_300, lambda outputs, _: outputs.sum(1), gr.Params("*"))
    torch.testing.assert_close(factors.squared_norms().sqrt(), torch.full((2,), 3000.0))


def test_the_model_is_left_as_found() -> None:
    model, a = network(), batch(4)
    model[1].register_forward_hook(lambda module, args, output: None)
    before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    hooks = [dict(module._forward_hooks) for module in model.modules()]

    def failing(outputs: Tensor, data: gr.Batch) -> Tensor:
        raise GradregError("on purpose")

    collect_factors(model, a, LOSS, gr.Params("*"))
    with pytest.raises(GradregError, match="on purpose"):
        collect_factors(model, a, failing, gr.Params("*"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), stream)


def test_bad_input() -> None:
    model, a = network(), batch(4)
    with pytest.raises(GradregError, match="layer factors are of parameters"):
        collect_factors(model, a, LOSS, gr.Inputs())
    with pytest.raises(GradregError, match="chunk_size=0"):
        gr.products(model, a, a, LOSS, gr.Params("*"), chunk_size=0)
    with pytest.raises(UnknownNameError):
        gr.products(model, a, a, LOSS, gr.Params("nothing.*"))
    mixing = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(CoupledExamplesError):
        gr.products(mixing, a, a, LOSS, gr.Params("0.*"))
