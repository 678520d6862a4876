"""Scalars that read extras: products with given vectors, and extras drawn after the shared forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradreg as gr
from gradreg.engine import draws_random_numbers, output_shape
from gradreg.errors import BatchError, ScalarError


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Counted(nn.Module):
    """A model that counts its forwards of whole batches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return self.model(x)


class Projected(gr.Regularizer):
    """Reads vectors that it draws itself."""

    def __init__(self, wrt: object) -> None:
        super().__init__()
        self.of, self.wrt = gr.scalars.projected("v"), wrt

    def shares(self) -> list[object]:
        return [(self.of, self.wrt)]

    def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
        torch.manual_seed(7)
        v = random(len(batch), *output_shape(model, batch))
        found = gr.gradients(model, batch.with_extras(v=v), self.of, self.wrt, differentiable=True)
        return sum(g.square().sum() for g in found.values())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def heads() -> nn.Module:
    base = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
    return gr.SharedBase(base, [nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(5)]).double()


@pytest.mark.parametrize(
    ("make", "wrt"),
    [(network, gr.Inputs()), (network, gr.Activations("0")), (heads, gr.Inputs()), (heads, gr.Features())],
    ids=["inputs", "activations", "heads, inputs", "heads, features"],
)
def test_extras_drawn_after_the_shared_forward(make: Callable[[], nn.Module], wrt: object) -> None:
    model, batch = make(), gr.Batch(random(6, 4), torch.randint(0, 3, (6,)))
    alone = Projected(wrt)(model, batch).detach()
    _, logs = gr.Objective(F.cross_entropy, penalty=Projected(wrt))(model, batch)
    torch.testing.assert_close(logs["penalty"], alone)


def test_the_shared_forward_is_the_only_one() -> None:
    model, batch = Counted(network()), gr.Batch(random(6, 4), torch.randint(0, 3, (6,)))
    objective = gr.Objective(F.cross_entropy, a=Projected(gr.Inputs()), b=gr.regularizers.InputGradient())
    objective(model, batch)
    model.calls.clear()
    objective(model, batch)
    assert model.calls == [6]


def test_other_data_is_not_served_by_the_shared_forward() -> None:
    class Elsewhere(gr.Regularizer):
        def shares(self) -> list[object]:
            return [(gr.logit(0), gr.Inputs())]

        def forward(self, model: nn.Module, batch: gr.Batch) -> Tensor:
            other = gr.Batch(batch.inputs + 1, batch.targets)
            return gr.gradients(model, other, gr.logit(0), gr.Inputs(), differentiable=True)["inputs"].square().sum()

    model, batch = network(), gr.Batch(random(6, 4), torch.randint(0, 3, (6,)))
    _, logs = gr.Objective(F.cross_entropy, penalty=Elsewhere())(model, batch)
    truth = gr.gradients(model, batch.inputs + 1, gr.logit(0), gr.Inputs())["inputs"].square().sum()
    torch.testing.assert_close(logs["penalty"], truth)


def test_projected_scalars_by_hand() -> None:
    model, x, v = network(), random(6, 4), random(6, 2, 3)
    jacobian = gr.gradients(model, x, gr.all_logits(), gr.Inputs())["inputs"]
    found = gr.gradients(model, gr.Batch(x, extras={"v": v}), gr.scalars.projected("v"), gr.Inputs())["inputs"]
    torch.testing.assert_close(found, torch.einsum("npc,nci->npi", v, jacobian))
    one = gr.gradients(model, gr.Batch(x, extras={"v": v[:, 0]}), gr.scalars.projected("v"), gr.Inputs())["inputs"]
    torch.testing.assert_close(one, found[:, 0])


def test_totals_by_hand() -> None:
    model, x = network(), random(6, 4)
    jacobian = gr.gradients(model, x, gr.all_logits(), gr.Inputs())["inputs"]
    found = gr.gradients(model, x, gr.scalars.total(), gr.Inputs())["inputs"]
    torch.testing.assert_close(found, jacobian.sum(1))
    logs = gr.gradients(model, x, lambda z, b: z.log_softmax(1).sum(1), gr.Inputs())["inputs"]
    torch.testing.assert_close(gr.gradients(model, x, gr.scalars.total_log_probability(), gr.Inputs())["inputs"], logs)


def test_shapes_and_draws() -> None:
    x = gr.Batch(random(6, 4))
    assert output_shape(network(), x) == (3,)
    assert output_shape(heads(), x) == (3,)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    state = torch.get_rng_state()
    assert draws_random_numbers(model, x)
    assert not draws_random_numbers(model.eval(), x)
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_with_extras() -> None:
    batch = gr.Batch(random(6, 4), extras={"a": random(6)})
    more = batch.with_extras(b=random(6, 2))
    assert more.same_data(batch)
    assert sorted(batch.extras) == ["a"]
    assert sorted(more[:2].extras) == ["a", "b"]
    assert not more.same_data(gr.Batch(batch.inputs.clone()))
    with pytest.raises(BatchError, match="6 examples but extras"):
        batch.with_extras(b=random(5))
    with pytest.raises(BatchError, match=r"extras\['mask'\] is needed: a mask. The batch has 'a'"):
        batch.extra("mask", "a mask")
    with pytest.raises(BatchError, match="holds a int"):
        batch.with_extras(b=3).extra("b", "numbers")


def test_bad_input() -> None:
    model, x = network(), random(6, 4)
    with pytest.raises(BatchError, match=r"extras\['v'\] is needed"):
        gr.gradients(model, x, gr.scalars.projected("v"), gr.Inputs())
    with pytest.raises(ScalarError, match=r"\(6, P, \*\(3,\)\)"):
        gr.gradients(model, gr.Batch(x, extras={"v": random(6, 2)}), gr.scalars.projected("v"), gr.Inputs())
    with pytest.raises(ScalarError, match="two classes"):
        gr.gradients(nn.Linear(4, 1).double(), x, gr.scalars.total_log_probability(), gr.Inputs())
