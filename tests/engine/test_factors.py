"""Factors of linear layers give per-example gradients, or say that they do not apply."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradreg import Batch, Params, SharedBase, gradients, loss
from gradreg.engine import linear_factors, output_scale_derivatives
from gradreg.errors import InPlaceError

OF = loss(F.cross_entropy)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(*shape: int) -> Batch:
    shape = shape or (5, 3)
    return Batch(torch.randn(*shape).double(), torch.arange(shape[0]) % 2)


@pytest.mark.parametrize("globs", [("*",), ("2.weight",), ("0.bias", "2.*")])
def test_outer_products_are_the_gradients(globs: tuple[str, ...]) -> None:
    model, batch, wrt = network(), data(), tuple(map(Params, globs))
    factors = linear_factors(model, batch, OF, wrt)
    assert factors is not None
    truth = gradients(model, batch, OF, wrt)
    names = set()
    for layer, item in factors.items():
        if item.weight:
            names.add(f"{layer}.weight")
            product = item.cotangents.unsqueeze(2) * item.inputs.unsqueeze(1)
            torch.testing.assert_close(product, truth[f"{layer}.weight"], rtol=1e-11, atol=1e-13)
        if item.bias:
            names.add(f"{layer}.bias")
            torch.testing.assert_close(item.cotangents, truth[f"{layer}.bias"], rtol=1e-11, atol=1e-13)
    assert names == set(truth)


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.layer(x).tanh()))


class Skipping(nn.Module):
    """Calls its layer by keyword, so that the hook cannot see the input."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(input=x)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "glob", "shape"),
    [
        (Reused(), "layer.*", (5, 3)),
        (Skipping(), "last.*", (5, 3)),
        (tied(), "2.*", (5, 3)),
        (nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten()), "0.*", (5, 1, 3)),
        (nn.Linear(3, 2), "*", (5, 3)),
        (SharedBase(nn.Linear(3, 4), [nn.Linear(4, 2), nn.Linear(4, 2)]), "heads.**", (5, 3)),
        (nn.Sequential(nn.Linear(3, 4), nn.Flatten(), nn.Linear(8, 2)), "0.*", (5, 2, 3)),
    ],
    ids=["reused", "keyword", "tied", "convolution", "root", "heads", "several positions"],
)
def test_where_they_do_not_apply(model: nn.Module, glob: str, shape: tuple[int, ...]) -> None:
    assert linear_factors(model.double(), data(*shape), OF, (Params(glob),)) is None


def test_an_input_that_is_changed_in_place_later() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            features = self.first(x).detach()
            return self.last(features * 1.0)

    class Changing(Detached):
        def forward(self, x: Tensor) -> Tensor:
            features = self.first(x) * 1.0
            outputs = self.last(features)
            with torch.no_grad():
                features.add_(1)
            return outputs

    assert linear_factors(Detached().double(), data(), OF, (Params("last.*"),)) is not None
    with pytest.raises((InPlaceError, RuntimeError), match=r"in.?place"):
        linear_factors(Changing().double(), data(), OF, (Params("last.bias"),))


def test_scale_derivatives_of_several_targets() -> None:
    model, batch = network(), data()
    found = output_scale_derivatives(model, batch, lambda outputs, _: outputs.square())
    torch.testing.assert_close(found, 2 * model(batch.inputs).square())
    single = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double()
    found = output_scale_derivatives(single, batch, lambda outputs, _: outputs.square())
    torch.testing.assert_close(found, 2 * single(batch.inputs).square())
