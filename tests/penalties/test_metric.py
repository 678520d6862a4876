"""Metrics: u.v becomes u'Mv, by hand, and what that means for gradients off the data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradreg as gr
from gradreg.errors import GradregError
from gradreg.penalties import Metric, as_metric, cosine, norm, pairwise_alignment, squared_norm


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def positive(d: int, rank: int) -> Tensor:
    factor = random(d, rank)
    return factor @ factor.T


@pytest.mark.parametrize("rank", [2, 5])
def test_a_matrix_gives_its_quadratic_form(rank: int) -> None:
    matrix, u, v = positive(5, rank), random(3, 5), random(3, 5)
    metric = as_metric(matrix)
    assert metric is not None
    assert metric.factor.shape == (5, rank)
    dot = torch.einsum("ni,ij,nj->n", u, matrix, v)
    torch.testing.assert_close((metric(u) * metric(v)).sum(1), dot)
    torch.testing.assert_close(squared_norm(metric.shaped(u)), torch.einsum("ni,ij,nj->n", u, matrix, u))
    root = metric.shaped(torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(root @ root, matrix)


def test_a_factor_and_the_identity() -> None:
    factor, g = random(4, 2), random(3, 6, 2, 2)
    metric = as_metric(factor)
    assert metric is not None
    assert metric(g).shape == (3, 6, 2)
    torch.testing.assert_close(metric(g), g.flatten(2) @ factor)
    assert metric.shaped(g).shape == g.shape
    torch.testing.assert_close(norm(Metric(torch.eye(4, dtype=torch.float64))(g), leading=2), norm(g, leading=2))
    assert as_metric(None) is None
    assert as_metric(metric) is metric


@pytest.mark.parametrize("whiten", [False, True])
def test_principal_directions(whiten: bool) -> None:
    plane = random(2, 6)
    features = 3 + random(50, 2) @ plane
    metric = Metric.pca(features.reshape(50, 2, 3), rank=2, whiten=whiten)
    covariance = torch.cov(features.T)
    expected = covariance if whiten else plane.T @ torch.linalg.inv(plane @ plane.T) @ plane
    torch.testing.assert_close(metric.factor @ metric.factor.T, expected)
    off = random(4, 6) @ (torch.eye(6, dtype=torch.float64) - torch.linalg.pinv(plane) @ plane)
    assert squared_norm(metric(off)).max() < 1e-20
    with pytest.raises(GradregError, match="span 2 directions of 6"):
        Metric.pca(features, rank=3)


def test_whitened_coordinates_are_what_the_gradient_is_taken_of() -> None:
    features = random(40, 3) @ random(3, 3)
    metric = Metric.pca(features, rank=3, whiten=True)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    z = random(5, 3).requires_grad_()
    (by_hand,) = torch.autograd.grad(net(z @ metric.factor.T).sum(), z)
    g = gr.gradients(net, (z @ metric.factor.T).detach(), gr.logit(0), gr.Inputs())["inputs"]
    torch.testing.assert_close(metric(g), by_hand)


def test_within_class_covariance() -> None:
    labels = torch.tensor([0, 1] * 10)
    features = random(20, 3) + 10 * labels.unsqueeze(1)
    own = torch.cat([features[labels == c] - features[labels == c].mean(0) for c in (0, 1)])
    covariance = own.T @ own / 20
    for shrinkage in (0.0, 0.3, 1.0):
        metric = Metric.within_class_whitening(features, labels, shrinkage)
        expected = (1 - shrinkage) * covariance + shrinkage * covariance.trace() / 3 * torch.eye(3, dtype=torch.float64)
        torch.testing.assert_close(metric.factor @ metric.factor.T, expected)


def test_orthogonal_off_the_data_is_seen_through() -> None:
    """Two equal functions on the data plane, made orthogonal off it: the plain cosine is fooled, the metric is not."""
    on, off = torch.eye(4, dtype=torch.float64)[:2], torch.eye(4, dtype=torch.float64)[2:]
    features = random(30, 2) @ on
    gradients = torch.stack([on[0] + off[0], on[0] - off[0]]).unsqueeze(0)
    metric = Metric.pca(features, rank=2)
    assert pairwise_alignment(gradients) < 1e-20
    torch.testing.assert_close(pairwise_alignment(metric(gradients)), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(
        cosine(metric(gradients[:, 0]), metric(gradients[:, 1])), torch.ones(1, dtype=torch.float64)
    )


def test_it_moves_and_is_saved_with_its_regularizer() -> None:
    regularizer = gr.regularizers.DiverseHeads(metric=torch.eye(3)[:, :2])
    assert regularizer.double().metric.factor.dtype == torch.float64
    assert "metric.factor" in regularizer.state_dict()
    heads = [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(3)]
    model = gr.SharedBase(nn.Linear(4, 3), heads).double()
    x = random(4, 4)
    g = gr.gradients(model, x, gr.top_logit(centered=True), gr.Features())["features"]
    torch.testing.assert_close(regularizer(model, x).detach(), pairwise_alignment(g[..., :2]))


def test_low_precision() -> None:
    metric, g = Metric(torch.randn(8, 3)), torch.randn(2, 8).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = metric(g)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, g.float() @ metric.factor)


def test_bad_input() -> None:
    with pytest.raises(GradregError, match="symmetric"):
        as_metric(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    with pytest.raises(GradregError, match="semidefinite"):
        as_metric(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    with pytest.raises(GradregError, match="zero"):
        as_metric(torch.zeros(2, 2))
    with pytest.raises(GradregError, match="not finite"):
        as_metric(torch.full((2, 2), torch.nan))
    with pytest.raises(GradregError, match="a str"):
        as_metric("pca")
    with pytest.raises(GradregError, match="gradients of 4 entries"):
        Metric(torch.eye(4))(torch.zeros(2, 3))
    with pytest.raises(GradregError, match="two examples"):
        Metric.pca(torch.zeros(1, 3), 1)
    with pytest.raises(GradregError, match="integer tensor"):
        Metric.within_class_whitening(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(GradregError, match="No class varies"):
        Metric.within_class_whitening(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(GradregError, match="shrinkage"):
        Metric.within_class_whitening(random(4, 3), torch.zeros(4, dtype=torch.long), 2.0)
