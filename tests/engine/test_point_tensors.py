"""Values of points in a plain forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradreg as gr
from gradreg.engine import point_tensors


def make() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Flatten(), nn.Linear(20, 2))
    return net.eval(), torch.randint(9, (2, 5))


def test_values_and_what_the_module_was_given() -> None:
    net, ids = make()
    found = point_tensors(net, ids, (gr.Embeddings(), gr.Activations("3")))
    assert list(found) == ["0", "3"]
    assert torch.equal(found["0"].value, net[0](ids))
    assert torch.equal(found["3"].value, net[:4](ids))
    assert torch.equal(found["0"].source, ids)
    assert not any(point.value.requires_grad for point in found.values())


def test_features_and_inputs() -> None:
    model = gr.SharedBase(nn.Linear(3, 4), [nn.Linear(4, 2) for _ in range(3)])
    x = torch.randn(5, 3)
    found = point_tensors(model, x, (gr.Inputs(), gr.Features()))
    assert torch.equal(found["inputs"].value, x)
    assert torch.equal(found["features"].value, model.base(x))


def test_a_graph_on_request() -> None:
    net, ids = make()
    value = point_tensors(net, ids, gr.Activations("1"), differentiable=True)["1"].value
    gradients = torch.autograd.grad(value.sum(), [net[0].weight, net[1].weight])
    assert all(bool(gradient.count_nonzero()) for gradient in gradients)


def test_random_streams_are_left_alone() -> None:
    net, ids = make()
    net.train()
    before = torch.get_rng_state()
    point_tensors(net, ids, gr.Activations("2"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("wrt", [gr.Params(), gr.Outputs()])
def test_what_is_no_point_is_refused(wrt: object) -> None:
    net, ids = make()
    with pytest.raises(gr.GradregError, match="no points"):
        point_tensors(net, ids, wrt)
