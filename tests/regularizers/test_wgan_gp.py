"""WGANGP: by the formula, in closed form, and the mistakes it is known for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradreg as gr
from gradreg.errors import BatchError, CoupledExamplesError, GradregError, ScalarError
from gradreg.regularizers import WGANGP
from tests.point_cases import CONVOLUTIONAL, PERCEPTRON, Architecture
from tests.regularizers.naive import (
    EVERY_ARCHITECTURE,
    Quadratic,
    case_of,
    finite_gradients,
    linear,
    random,
    same,
    slope,
    zeroed,
)


def pairs(n: int = 5, **more: torch.Tensor) -> gr.Batch:
    extras = {"fake": random(n, 4), "alpha": torch.rand(n, dtype=torch.float64), **more}
    return gr.Batch(random(n, 4), extras=extras)


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("outputs", [1, 3])
def test_equals_the_formula(architecture: Architecture, outputs: int) -> None:
    penalty, model, batch = case_of("WGANGP", architecture, outputs)
    rows = []
    for real, fake, alpha in zip(batch.inputs, *batch.extras.values(), strict=True):
        g = slope(model, real + alpha * (fake - real), lambda z: z.sum())
        rows.append(((g.square().sum() + 1e-12).sqrt() - 1) ** 2)
    same(penalty(model, batch), sum(rows) / len(rows))


def test_linear_and_quadratic_critics_in_closed_form() -> None:
    batch = pairs()
    critic = linear(1)
    same(WGANGP()(critic, batch), (critic.weight.norm() - 1).square().detach())
    critic = Quadratic()
    x, fake, alpha = batch.inputs, batch.extras["fake"], batch.extras["alpha"].unsqueeze(1)
    norms = (((1 - alpha) * x + alpha * fake) @ critic.matrix).norm(dim=1)
    same(WGANGP()(critic, batch), (norms - 1).square().mean().detach())
    same(WGANGP(center=0.0)(critic, batch), norms.square().mean().detach())
    same(WGANGP(one_sided=True)(critic, batch), (norms - 1).clamp(min=0).square().mean().detach())


def test_the_norm_is_over_all_axes() -> None:
    penalty, model, batch = case_of("WGANGP", CONVOLUTIONAL)
    value = penalty(model, batch)
    x, (fake, alpha) = batch.inputs, batch.extras.values()
    point = torch.lerp(x, fake, alpha.view(-1, 1, 1, 1)).requires_grad_()
    (g,) = torch.autograd.grad(model(point).sum(), point)
    same(value, (g.flatten(1).norm(dim=1) - 1).square().mean())
    assert abs(float(value.detach()) - float((g.norm(dim=1) - 1).square().mean())) > 0.05  # over channels only


@pytest.mark.filterwarnings("ignore::gradreg.ZeroSecondDerivativeWarning")
def test_a_dead_critic_gives_one_and_no_nan() -> None:
    critic = zeroed(PERCEPTRON.model(1))
    value = WGANGP()(critic, pairs())
    same(value, (1 - 1e-6) ** 2)
    finite_gradients(value, critic)


def test_one_number_per_example_from_the_global_stream() -> None:
    x, fake, critic = random(5, 4), random(5, 4), Quadratic()
    torch.manual_seed(3)
    value = WGANGP()(critic, gr.Batch(x, extras={"fake": fake}))
    torch.manual_seed(3)
    alpha = torch.rand(5, dtype=torch.float64)
    same(WGANGP()(critic, gr.Batch(x, extras={"fake": fake, "alpha": alpha})), value.detach())
    assert not torch.equal(WGANGP()(critic, gr.Batch(x, extras={"fake": fake})), value)


def test_fakes_with_a_graph_are_reached() -> None:
    generator = nn.Linear(2, 4).double()
    batch = gr.Batch(random(5, 4), extras={"fake": generator(random(5, 2))})
    WGANGP()(Quadratic(), batch).backward()
    assert generator.weight.grad.abs().sum() > 0


def test_a_critic_of_patches_and_one_without_an_axis() -> None:
    patches = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 1, 2)).double()
    x, fake = random(3, 2, 4, 4), random(3, 2, 4, 4)
    alpha = torch.zeros(3, dtype=torch.float64)
    g = torch.stack([slope(patches, one, lambda z: z.sum()) for one in x])
    expected = (g.flatten(1).norm(dim=1) - 1).square().mean()
    same(WGANGP()(patches, gr.Batch(x, extras={"fake": fake, "alpha": alpha})), expected)
    bare = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)).double()
    assert bare(random(5, 4)).shape == (5,)
    assert WGANGP()(bare, pairs()) > 0


def test_a_conditional_critic() -> None:
    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1))

        def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
            return self.net(torch.cat([x, condition], 1))

    x, condition = random(3, 4), random(3, 2)
    batch = gr.Batch((x, condition), extras={"fake": random(3, 4)})
    model = Conditional().double()
    assert WGANGP(wrt=gr.Inputs("0"))(model, batch) >= 0
    with pytest.raises(BatchError, match="one real floating-point input"):
        WGANGP()(model, batch)


def test_bad_input() -> None:
    x = random(5, 4)
    with pytest.raises(BatchError, match=r"extras\['fake'\] is needed"):
        WGANGP()(Quadratic(), x)
    with pytest.raises(BatchError, match=r"\(5, 3\).*\(5, 4\)"):
        WGANGP()(Quadratic(), gr.Batch(x, extras={"fake": random(5, 3)}))
    with pytest.raises(BatchError, match=r"expected \(5,\)"):
        WGANGP()(Quadratic(), pairs(alpha=random(5, 4)))
    with pytest.raises(GradregError, match="eps"):
        WGANGP(eps=0.0)
    with pytest.raises(ScalarError, match="one score per example"):
        WGANGP(of=gr.all_logits())(PERCEPTRON.model(), pairs())
    mixing = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()
    with pytest.raises(CoupledExamplesError, match="BatchNorm"):
        WGANGP()(mixing, pairs())
