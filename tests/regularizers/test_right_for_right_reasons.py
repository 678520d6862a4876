"""RightForRightReasons: by the formula, its three reductions, and masks that do not fit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import gradreg as gr
from gradreg.errors import BatchError, GradregError
from gradreg.regularizers import RightForRightReasons
from tests.point_cases import CONVOLUTIONAL, PERCEPTRON, Architecture, heads
from tests.regularizers.naive import EVERY_ARCHITECTURE, case_of, finite_gradients, linear, random, same, slope, zeroed


@EVERY_ARCHITECTURE
def test_equals_the_formula(architecture: Architecture) -> None:
    penalty, model, batch = case_of("RightForRightReasons", architecture)
    rows = [
        (mask * slope(model, x, lambda z: F.log_softmax(z, 0).sum())).square().sum()
        for x, mask in zip(batch.inputs, batch.extras["mask"], strict=True)
    ]
    same(penalty(model, batch), sum(rows) / len(rows))
    same(RightForRightReasons(reduction="sum")(model, batch), sum(rows))
    same(RightForRightReasons(reduction="mask")(model, batch), sum(rows) / batch.extras["mask"].sum())


def test_a_linear_softmax_in_closed_form() -> None:
    model, x, mask = linear(), random(5, 4), random(5, 4) > 0
    p, W = model(x).softmax(1), model.weight
    gradient = W.sum(0) - 3 * p @ W
    batch = gr.Batch(x, extras={"mask": mask})
    same(RightForRightReasons()(model, batch), (mask * gradient).square().sum(1).mean().detach())


def test_weights_and_masks_for_all_channels() -> None:
    model, x = CONVOLUTIONAL.model(), CONVOLUTIONAL.inputs()
    weights = torch.rand(3, 1, 4, 4, dtype=torch.float64)
    narrow = gr.Batch(x, extras={"mask": weights})
    full = gr.Batch(x, extras={"mask": weights.expand(3, 2, 4, 4)})
    for reduction in ("mean", "sum", "mask"):
        penalty = RightForRightReasons(reduction=reduction)
        same(penalty(model, narrow), penalty(model, full).detach())


def test_nothing_masked_is_zero_and_finite() -> None:
    model, x = PERCEPTRON.model(), PERCEPTRON.inputs(1)
    batch = gr.Batch(x, extras={"mask": torch.zeros(1, 4)})
    for reduction in ("mean", "mask"):
        with pytest.warns(gr.ZeroSecondDerivativeWarning):
            value = RightForRightReasons(reduction=reduction)(model, batch)
        assert value == 0
        finite_gradients(value, model)


@pytest.mark.filterwarnings("ignore::gradreg.ZeroSecondDerivativeWarning")
def test_zero_gradients_are_finite() -> None:
    model = zeroed(PERCEPTRON.model())
    value = RightForRightReasons()(model, gr.Batch(PERCEPTRON.inputs(1), extras={"mask": torch.ones(1, 4)}))
    assert value == 0
    finite_gradients(value, model)


def test_a_projection_before_the_mask() -> None:
    model, x, mask = PERCEPTRON.model(), PERCEPTRON.inputs(), torch.ones(3, 4)
    batch = gr.Batch(x, extras={"mask": mask})
    plane = torch.linalg.qr(random(4, 2)).Q
    g = torch.stack([slope(model, one, lambda z: F.log_softmax(z, 0).sum()) for one in x])
    expected = (g @ plane @ plane.T).square().sum(1).mean()
    same(RightForRightReasons(metric=plane)(model, batch), expected)


def test_features_of_heads_and_activations() -> None:
    model, x = heads(), random(3, 4)
    mask = random(3, 5) > 0
    batch = gr.Batch(x, extras={"mask": mask})
    h = model.base(x).detach()
    rows = [
        (m * slope(head, one, lambda z: F.log_softmax(z, 0).sum())).square().sum()
        for head in model.heads
        for one, m in zip(h, mask, strict=True)
    ]
    same(RightForRightReasons(wrt=gr.Features())(model, batch), sum(rows) / len(rows))
    net = torch.nn.Sequential(model.base, model.heads[0])
    same(RightForRightReasons(wrt=gr.Activations("0"))(net, batch), sum(rows[:3]) / 3)
    with pytest.raises(BatchError, match=r"\(3, 4\); the gradient has \(3, 5\)"):
        RightForRightReasons(wrt=gr.Features())(model, gr.Batch(x, extras={"mask": x > 0}))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (None, r"extras\['mask'\] is needed"),
        (torch.ones(5, 4, dtype=torch.long), r"int64.*mask\.bool\(\)"),
        (torch.ones(5, 4, dtype=torch.complex64), "complex64"),
        (torch.ones(5, 3), r"\(5, 3\); the input has \(5, 4\)"),
        (torch.ones(5), r"\(5,\); the input has \(5, 4\)"),
        (torch.full((5, 4), torch.nan), "not finite"),
    ],
)
def test_masks_that_do_not_fit(mask: torch.Tensor | None, words: str) -> None:
    extras = {} if mask is None else {"mask": mask}
    with pytest.raises(BatchError, match=words):
        RightForRightReasons()(linear(), gr.Batch(random(5, 4), extras=extras))


def test_bad_input() -> None:
    with pytest.raises(GradregError, match="reduction"):
        RightForRightReasons(reduction="max")
