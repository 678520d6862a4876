"""Figures show the numbers that they are asked for."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import gradreg as gr
from gradreg.errors import GradregError


def make():
    return gr.Attribution(
        {"encoder": torch.randn(2, 3, 2, 4), "decoder": torch.randn(2, 3, 2, 3)},
        "input_x_gradient",
        "token",
        target_axes=("token", "class"),
        labels={"encoder": [["a", " b", "$x$", "[PAD]"]] * 2, "decoder": [["<s>", "\n", " "]] * 2},
        valid={"encoder": torch.tensor([[True, True, True, False]] * 2)},
        segments={"encoder": "source", "decoder": "target prefix"},
        target_labels={"class": ["no", "yes"]},
        provenance={"of": "logit"},
    )


def texts(ticks):
    return [tick.get_text() for tick in ticks]


def test_bars():
    a = make()
    axes = a.plot(example=1, target=(2, 1)).axes[0]
    values = [bar.get_width() for bar in axes.patches]
    expected = torch.cat([a.by_key["encoder"][1, 2, 1, :3], a.by_key["decoder"][1, 2, 1]])
    assert np.allclose(values, expected)
    assert texts(axes.get_yticklabels()) == ["a", "b", "$x$", "<s>", "⏎", "␣"]
    assert axes.get_title() == "input x gradient, example 1, token 2 (' '), class 1 (yes)"
    assert texts(axes.texts) == ["source", "target prefix"]
    assert axes.get_xlabel() == "score, in units of the target"


def test_heat_map(tmp_path):
    a = make()
    figure = a.plot(target=(None, 0))
    axes = figure.axes[0]
    expected = torch.cat([a.by_key["encoder"][0, :, 0, :3], a.by_key["decoder"][0, :, 0]], -1)
    image = axes.images[0]
    assert np.allclose(image.get_array(), expected)
    assert image.norm.vmax == -image.norm.vmin == pytest.approx(float(expected.abs().max()))
    assert texts(axes.get_yticklabels()) == ["0 <s>", "1 ⏎", "2 ␣"]
    figure.savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
    classes = a.plot(target=(1, None)).axes[0]
    assert texts(classes.get_yticklabels()) == ["0 no", "1 yes"]


def test_what_needs_no_target():
    plain = gr.Attribution({"x": torch.randn(1, 3)}, "saliency", "feature")
    assert len(plain.plot().axes[0].patches) == 3
    classes = gr.Attribution({"x": torch.randn(1, 2, 3)}, "saliency", "token", target_axes=("class",))
    assert classes.plot().axes[0].images[0].get_array().shape == (2, 3)
    assert len(classes.plot(target=1).axes[0].patches) == 3


def test_what_cannot_be_drawn():
    a = make()
    with pytest.raises(GradregError, match=r"target=None does not say .* token 3, class 2.*None for at most one"):
        a.plot()
    with pytest.raises(GradregError, match="target=1 does not say"):
        a.plot(target=1)
    with pytest.raises(GradregError, match="no class 2; allowed"):
        a.plot(target=(0, 2))
    with pytest.raises(GradregError, match="no example 5"):
        a.plot(5, (0, 0))
    image = gr.Attribution({"x": torch.ones(1, 4, 4)}, "saliency", "feature")
    with pytest.raises(GradregError, match=r"per feature, with the shape \[4, 4\].*only one axis can be shown"):
        image.plot()
    long = gr.Attribution({"x": torch.ones(1, 201)}, "saliency", "token")
    with pytest.raises(GradregError, match="201 tokens; a figure shows up to 200"):
        long.plot()
    padding = gr.Attribution({"x": torch.ones(1, 2)}, "saliency", "token", valid={"x": torch.zeros(1, 2).bool()})
    with pytest.raises(GradregError, match="no real positions"):
        padding.plot()


def test_letters_that_the_font_lacks(tmp_path):
    a = gr.Attribution({"x": torch.randn(1, 2)}, "saliency", "token", labels={"x": [["日", "é"]]})
    figure = a.plot()
    figure.savefig(tmp_path / "a.png")  # without a warning
    assert texts(figure.axes[0].get_yticklabels()) == ["\\u65e5", "é"]


def test_no_global_state():
    sys.modules.pop("matplotlib.pyplot", None)
    make().plot(target=(0, 0))
    assert "matplotlib.pyplot" not in sys.modules
