"""AttributionPrior: attributions by the formula and their derivative in the weights, and the priors on them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import BatchError, GradregError
from gradreg.penalties import total_variation
from gradreg.regularizers import AttributionPrior
from tests.point_cases import PERCEPTRON, Architecture, heads
from tests.regularizers.naive import EVERY_ARCHITECTURE, case_of, finite_gradients, linear, random, same, slope, zeroed


def expected_gradients(model: nn.Module, batch: gr.Batch) -> Tensor:
    found = []
    for x, y, references, alphas in zip(batch.inputs, batch.targets, *batch.extras.values(), strict=True):
        samples = [
            (x - reference) * slope(model, reference + alpha * (x - reference), lambda z, y=y: z[y])
            for reference, alpha in zip(references, alphas, strict=True)
        ]
        found.append(torch.stack(samples).mean(0))
    return torch.stack(found)


@EVERY_ARCHITECTURE
def test_equals_the_formula(architecture: Architecture) -> None:
    penalty, model, batch = case_of("AttributionPrior", architecture)
    phi = expected_gradients(model, batch)
    same(penalty.attributions(model, batch), phi)
    if phi.dim() == 2:
        smooth = (phi[:, 1:] - phi[:, :-1]).abs().sum(1)
    elif phi.dim() == 3:
        smooth = (phi[:, :, 1:] - phi[:, :, :-1]).abs().sum((1, 2))
    else:
        across, down = phi[..., 1:] - phi[..., :-1], phi[..., 1:, :] - phi[..., :-1, :]
        smooth = across.abs().sum((1, 2, 3)) + down.abs().sum((1, 2, 3))
    same(penalty(model, batch), smooth.mean())
    magnitude = phi.abs().mean(0).flatten()
    pairs = (magnitude.unsqueeze(0) - magnitude.unsqueeze(1)).abs().sum()
    same(AttributionPrior(prior="sparsity")(model, batch), -pairs / (len(magnitude) * magnitude.sum()))


def test_a_linear_model_in_closed_form() -> None:
    model, x, y, references = linear(), random(5, 4), torch.tensor([0, 1, 2, 0, 1]), random(5, 3, 4)
    batch = gr.Batch(x, y, extras={"references": references})
    expected = (x - references.mean(1)) * model.weight[y]
    same(AttributionPrior().attributions(model, batch), expected.detach())
    squares = AttributionPrior(prior=lambda a: a.square().sum(1))(model, batch)
    same(squares, expected.square().sum(1).mean().detach())


def test_attributions_are_trainable() -> None:
    """d(attribution loss)/d(weights) is that of the graph written by hand."""
    model, x, y = PERCEPTRON.model(), random(2, 4), torch.tensor([2, 0])
    reference, alpha = random(2, 1, 4), torch.rand(2, 1, dtype=torch.float64)
    batch = gr.Batch(x, y, extras={"references": reference, "alpha": alpha})
    penalty = AttributionPrior(prior=lambda a: a.square().sum(1).sqrt())
    found = torch.autograd.grad(penalty(model, batch), list(model.parameters()), allow_unused=True)

    point = (reference[:, 0] + alpha * (x - reference[:, 0])).requires_grad_()
    picked = model(point)[[0, 1], y].sum()
    (g,) = torch.autograd.grad(picked, point, create_graph=True)
    by_hand = (((x - reference[:, 0]) * g).square().sum(1).sqrt()).mean()
    expected = torch.autograd.grad(by_hand, list(model.parameters()), allow_unused=True)
    assert sum(gradient is not None and bool(gradient.any()) for gradient in found) == 5  # all but the last bias
    for own, other in zip(found, expected, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-14)


def test_they_add_up() -> None:
    """Over a fine grid of alpha, attributions sum to the difference of the outputs."""
    model, x, y, reference = PERCEPTRON.model(), random(2, 4), torch.tensor([2, 0]), random(2, 1, 4)
    grid = ((torch.arange(200, dtype=torch.float64) + 0.5) / 200).expand(2, 200)
    batch = gr.Batch(x, y, extras={"references": reference.expand(2, 200, 4), "alpha": grid})
    total = AttributionPrior().attributions(model, batch).sum(1)
    difference = (model(x) - model(reference[:, 0]))[[0, 1], y]
    torch.testing.assert_close(total, difference, rtol=1e-4, atol=1e-6)


def test_references_and_alpha_are_drawn_from_the_global_stream() -> None:
    model, x, y, background = PERCEPTRON.model(), random(5, 4), torch.tensor([0, 1, 2, 0, 1]), random(7, 4)
    penalty = AttributionPrior(references=background, samples=3)
    torch.manual_seed(3)
    value = penalty(model, (x, y))
    torch.manual_seed(3)
    chosen, alpha = torch.randint(7, (5, 3)), torch.rand(5, 3, dtype=torch.float64)
    batch = gr.Batch(x, y, extras={"references": background[chosen], "alpha": alpha})
    same(AttributionPrior()(model, batch), value.detach())
    assert "references" in penalty.state_dict()
    assert not torch.equal(penalty(model, (x, y)), value)


def test_heads_and_the_plain_expected_gradient() -> None:
    model, x, y = heads(), random(3, 4), torch.tensor([0, 1, 2])
    extras = {"references": random(3, 2, 4), "alpha": torch.rand(3, 2, dtype=torch.float64)}
    batch = gr.Batch(x, y, extras=extras)
    each = [expected_gradients(nn.Sequential(model.base, head), batch) for head in model.heads]
    same(AttributionPrior().attributions(model, batch), torch.stack(each, 1))
    same(AttributionPrior()(model, batch), total_variation(torch.cat(each)).mean())
    net = nn.Sequential(model.base, model.heads[0])
    plain = AttributionPrior(multiply=False).attributions(net, batch)
    points = extras["references"] + extras["alpha"].unsqueeze(2) * (x.unsqueeze(1) - extras["references"])
    g = [torch.stack([slope(net, p, lambda z, i=i: z[y[i]]) for p in points[i]]).mean(0) for i in range(3)]
    same(plain, torch.stack(g))


@pytest.mark.filterwarnings("ignore::gradreg.ZeroSecondDerivativeWarning")
@pytest.mark.parametrize("prior", ["smoothness", "sparsity"])
def test_zero_attributions_are_finite(prior: str) -> None:
    model = zeroed(PERCEPTRON.model())
    batch = (PERCEPTRON.inputs(1), torch.tensor([1]))
    value = AttributionPrior(prior=prior, references=torch.zeros(1, 4))(model, batch)
    assert value == 0
    finite_gradients(value, model)


def test_the_projected_gradient() -> None:
    model, x, y = linear(), random(5, 4), torch.tensor([0, 1, 2, 0, 1])
    plane = torch.linalg.qr(random(4, 2)).Q
    batch = gr.Batch(x, y, extras={"references": torch.zeros(5, 1, 4, dtype=torch.float64)})
    found = AttributionPrior(metric=plane).attributions(model, batch)
    same(found, (x * (model.weight[y] @ plane @ plane.T)).detach())


def test_bad_input() -> None:
    batch = (random(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    with pytest.raises(BatchError, match="needs references"):
        AttributionPrior()(linear(), batch)
    with pytest.raises(BatchError, match="must agree"):
        AttributionPrior(references=random(2, 3))(linear(), batch)
    with pytest.raises(BatchError, match=r"\(5, k, \*\(4,\)\)"):
        AttributionPrior()(linear(), gr.Batch(*batch, extras={"references": random(5, 4)}))
    with pytest.raises(GradregError, match="prior='smooth'"):
        AttributionPrior(prior="smooth")
    with pytest.raises(GradregError, match="samples=0"):
        AttributionPrior(samples=0)
    with pytest.raises(GradregError, match=r"must return \[5\] or a scalar"):
        AttributionPrior(prior=lambda a: a, references=random(2, 4))(linear(), batch)
