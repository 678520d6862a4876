"""What an attribution is made of has to fit, and nothing of it gets lost."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import gradreg as gr
from gradreg.attribution._look import Score
from gradreg.errors import GradregError


def make(**changed):
    """Two examples, the second shorter; three tokens of which each has two classes."""
    valid = torch.tensor([[True, True, True], [True, True, False]])
    scores = torch.randn(2, 3, 2, 3, dtype=torch.float64).masked_fill(~valid[:, None, None], 0)
    arguments = {
        "by_key": {"embeddings": scores},
        "method": "integrated_gradients",
        "per": "token",
        "change": scores.sum(-1) - 0.5,
        "delta": torch.full((2, 3, 2), 0.5, dtype=torch.float64),
        "error": torch.rand(2, 3, 2),
        "target_axes": ("token", "class"),
        "ids": {"embeddings": torch.tensor([[5, 6, 7], [5, 6, 0]])},
        "valid": {"embeddings": valid},
        "segments": {"embeddings": "source"},
        "labels": {"embeddings": [["a", "b", "c"], ["a", "\u2028", "[PAD]"]]},
        "target_labels": {"class": ["no", "yes"]},
        "provenance": {"dtype": torch.float64, "plan": ("forward", 3), "nan": float("nan"), "versions": {"torch": "2"}},
    }
    return gr.Attribution(**{**arguments, **changed})


WRONG = [
    ({"by_key": {}}, "by_key is empty"),
    ({"by_key": {"embeddings": torch.ones(2, 3, 2, 3, dtype=torch.long)}}, "'embeddings'] is torch.int64"),
    ({"by_key": {"embeddings": [1.0]}}, "is list; scores are floating-point tensors"),
    ({"by_key": {"embeddings": torch.ones(2, 3, 3)}}, r"shape \[2, 3, 3\]; per token.*\[n, token, class, L\]"),
    ({"by_key": {"embeddings": torch.ones(2, 3, 2, 3, 4)}}, r"shape \[2, 3, 2, 3, 4\].*\[n, token, class, L\]"),
    (
        {"by_key": {"embeddings": torch.ones(2, 3, 2, 3), "b": torch.ones(2, 3, 4, 3)}},
        r"'b'\] has .*\[2, 3, 4\].*\[2, 3, 2\]",
    ),
    ({"per": "word"}, "per='word'.*'token' and 'feature'"),
    ({"target_axes": ("token", "token")}, "names have to be different"),
    ({"target_axes": ("token", "example")}, "none of them 'example'"),
    ({"change": torch.ones(2, 3)}, r"change is of shape \[2, 3\]; .*\[2, 3, 2\] \(2 example x 3 token x 2 class\)"),
    ({"delta": torch.ones(2, 3, 2, 3)}, "delta is of shape"),
    ({"error": 0.5}, "error is a float"),
    ({"ids": {"embedding": torch.ones(2, 3, dtype=torch.long)}}, "ids has the key 'embedding'.*Closest: 'embeddings'"),
    ({"ids": {"embeddings": torch.ones(2, 3)}}, "torch.float32; allowed are integers"),
    ({"ids": {"embeddings": torch.ones(3, 2, dtype=torch.long)}}, r"of shape \[3, 2\]; the scores have \[2, 3\]"),
    ({"valid": {"embeddings": torch.ones(2, 3)}}, "allowed are booleans"),
    ({"segments": {"x": "source"}}, "segments has the key 'x'"),
    ({"labels": {"embeddings": [["a", "b", "c"], ["a", "b"]]}}, r"lengths \[3, 2\].*2 examples of 3 positions"),
    ({"labels": {"embeddings": [["a", "b", "c"], ["a", "b", 3]]}}, r"\[1\]\[2\] is 3; labels are texts"),
    ({"target_labels": {"class": ["no"]}}, "1 names; the axis 'class' has 2 targets"),
    ({"target_labels": {"tag": ["no"]}}, "key 'tag', which is not one of target_axes"),
    ({"target_labels": {"token": [["a", "b", None]]}}, r"\[3\] names; the axis 'token' has 3 targets, of 2 examples"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=range(len(WRONG)))
def test_what_does_not_fit_is_named(changed, message):
    with pytest.raises(GradregError, match="(?s)" + message):
        make(**changed)


def test_sums_leave_padding_out():
    a = make(by_key={"embeddings": torch.ones(2, 3, 2, 3)})
    assert torch.equal(a.total[0], torch.full((3, 2), 3.0))
    assert torch.equal(a.total[1], torch.full((3, 2), 2.0))
    features = gr.Attribution(
        {"x": torch.ones(2, 3, 5), "y": torch.ones(2, 4)}, "saliency", "feature", valid={"x": torch.eye(2, 3).bool()}
    )
    assert features.total.tolist() == [9.0, 9.0]
    with pytest.raises(GradregError, match="keys 'x', 'y'; take by_key"):
        _ = features.scores


def test_the_scores_of_several_keys_follow_each_other():
    parts = {"encoder": torch.randn(1, 4, 3), "decoder": torch.randn(1, 4, 2)}
    a = gr.Attribution(parts, "saliency", "token", target_axes=("token",))
    assert torch.equal(a.scores, torch.cat([parts["encoder"], parts["decoder"]], -1))


def test_relative_delta():
    a = gr.Attribution(
        {"x": torch.ones(1, 4, 1)},
        "integrated_gradients",
        "token",
        target_axes=("class",),
        change=torch.tensor([[2.0, -4.0, 0.0, 0.0]]),
        delta=torch.tensor([[-1.0, 1.0, 0.0, 1.0]]),
    )
    assert a.relative_delta.tolist() == [[0.5, 0.25, 0.0, float("inf")]]
    assert gr.Attribution({"x": torch.ones(1, 1)}, "saliency", "token").relative_delta is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_nothing_gets_lost_on_disk(tmp_path, dtype):
    expanded = torch.randn(3, dtype=dtype).expand(2, 3, 2, 3)  # several views of one storage, not contiguous
    a = make(by_key={"a/b\u2028": expanded.transpose(0, 0), "": expanded}, ids={}, valid={}, segments={}, labels={})
    a.save(tmp_path / "deep" / "a.safetensors")
    b = gr.Attribution.load(tmp_path / "deep" / "a.safetensors")
    same(a, b)
    assert list(b.by_key) == ["a/b\u2028", ""]


def test_everything_comes_back(tmp_path):
    a = make()
    a.save(str(tmp_path / "a.safetensors"))
    b = gr.Attribution.load(str(tmp_path / "a.safetensors"))
    same(a, b)
    assert b.provenance == {"dtype": "torch.float64", "plan": ["forward", 3], "nan": "nan", "versions": {"torch": "2"}}
    assert str(a) == str(b)
    assert list(tmp_path.iterdir()) == [tmp_path / "a.safetensors"]  # no temporary file


def test_a_graph_stays_behind(tmp_path):
    scores = torch.ones(1, 2, requires_grad=True) * 2
    gr.Attribution({"x": scores}, "saliency", "token").save(tmp_path / "a.safetensors")
    assert not gr.Attribution.load(tmp_path / "a.safetensors").scores.requires_grad


def test_scores_that_carry_a_graph_are_shown():
    scores = torch.ones(1, 2, 3, requires_grad=True) * 2
    lead = scores.sum(-1)
    a = gr.Attribution({"x": scores}, "saliency", "token", lead, lead, lead, target_axes=("class",))
    assert "largest |delta| 6" in str(a)
    assert a.plot().axes
    assert a.to_html()
    assert a.top(target=0)[0].score == 2


def same(a, b):
    for name in ("by_key", "ids", "valid"):
        one, other = getattr(a, name), getattr(b, name)
        assert list(one) == list(other)
        for key, value in one.items():
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key])
    for name in ("change", "delta", "error"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    for name in ("method", "per", "target_axes", "segments", "labels", "target_labels", "provenance"):
        assert getattr(a, name) == getattr(b, name), name


def test_files_that_are_none(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(GradregError, match=r"a\.safetensors is no file"):
        gr.Attribution.load(path)
    make().save(path)
    whole = path.read_bytes()
    for cut in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(GradregError, match=r"a\.safetensors is no whole safetensors file"):
            gr.Attribution.load(path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(GradregError, match=r"not one that holds an attribution"):
        gr.Attribution.load(path)
    save_file({"x": torch.ones(1)}, path, metadata={"gradreg": '{"index": "other", "rows": 3}'})
    with pytest.raises(GradregError, match=r"not one that holds an attribution"):
        gr.Attribution.load(path)
    with pytest.raises(GradregError, match=r"does not end in \.safetensors"):
        make().save(tmp_path / "a.pt")


def test_versions(tmp_path):
    path = tmp_path / "a.safetensors"
    make().save(path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["gradreg"])

    def written(**changed):
        new = {key: value for key, value in {**about, **changed}.items() if value is not None}
        text = json.dumps({**header, "__metadata__": {"gradreg": json.dumps(new)}}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    written(version=2)
    with pytest.raises(GradregError, match="has version 2; this gradreg reads versions up to 1"):
        gr.Attribution.load(path)
    written(method=None)
    with pytest.raises(GradregError, match="lacks or garbles 'method'"):
        gr.Attribution.load(path)
    written(method="saliency")
    assert gr.Attribution.load(path).method == "saliency"


def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.safetensors"
    make().save(path)
    before = path.read_bytes()
    code = (
        "import os, pathlib, sys, torch, gradreg as gr\n"
        "def half(file, data):\n"
        "    with open(file, 'wb') as handle:\n"
        "        handle.write(data[:50])\n"
        "    os._exit(3)\n"
        "pathlib.Path.write_bytes = half\n"
        "gr.Attribution({'x': torch.ones(1, 2)}, 'saliency', 'token').save(sys.argv[1])\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 3
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2  # the half one has a temporary name


def test_selection():
    a = make()
    one = a.select("example", 1)
    assert one.scores.shape == (1, 3, 2, 3)
    assert torch.equal(one.scores[0], a.scores[1])
    assert one.labels == {"embeddings": [a.labels["embeddings"][1]]}
    assert torch.equal(one.valid["embeddings"], a.valid["embeddings"][1:])
    yes = a.select("class", 1)
    assert yes.target_axes == ("token",)
    assert torch.equal(yes.delta, a.delta[..., 1])
    assert torch.equal(yes.scores, a.scores[:, :, 1])
    assert yes.target_labels == {}
    both = a.select("class", [1, -2]).select("token", [2, 0])
    assert both.target_labels == {"class": ["yes", "no"], "token": [["c", "a"], [None, "a"]]}
    assert torch.equal(both.scores, a.scores[:, [2, 0]][:, :, [1, 0]])
    for axis, which, message in (
        ("classes", 0, "no axis 'classes'. Closest: 'class'"),
        ("class", 2, "no class 2; allowed are integers from 0 to 1"),
        ("class", [], "Nothing of the axis 'class'"),
        ("class", ["yes"], "'yes' is no number"),
        ("class", [True], "no class True"),
    ):
        with pytest.raises(GradregError, match=message):
            a.select(axis, which)


def test_the_largest_scores():
    scores = torch.tensor([[[1.0, -3.0, 2.0, 9.0]]])
    a = gr.Attribution(
        {"x": scores},
        "saliency",
        "token",
        target_axes=("class",),
        valid={"x": torch.tensor([[True, True, True, False]])},
        labels={"x": [["a", "b", "c", "[PAD]"]]},
    )
    assert a.top(2, target=0) == [Score("x", 1, "b", -3.0), Score("x", 2, "c", 2.0)]
    assert [one.label for one in a.top(99, target=(-1,))] == ["b", "c", "a"]
    with pytest.raises(GradregError, match=r"target=\(\) has 0 numbers; the axes of targets are 1 \(class\)"):
        a.top()
    with pytest.raises(GradregError, match="no example 1"):
        a.top(example=1, target=0)
    broken = gr.Attribution({"x": torch.tensor([[5.0, float("nan"), 1.0]])}, "saliency", "token")
    assert [one.position for one in broken.top()] == [1, 0, 2]


def test_as_text():
    a = make()
    assert repr(a) == (
        "Attribution by integrated_gradients per token: 2 examples, 3 token x 2 class, 'embeddings' [3]; "
        f"largest |delta| 0.5, largest estimated error {float(a.error.max()):.2g}"
    )
    lines = str(a).splitlines()
    assert len(lines) == 1 + 12  # a line for each target
    assert re.match(r"  example 0, token 1 \(b\), class 1 \(yes\): '[abc]' [+-]", lines[4])
    assert "[PAD]" not in str(a)
    many = gr.Attribution({"x": torch.ones(3, 5, 2)}, "saliency", "token", target_axes=("class",))
    assert str(many).splitlines()[-1] == "  ... and 3 more"
    image = gr.Attribution({"x": torch.ones(3, 2, 4, 4)}, "saliency", "feature", target_axes=("class",))
    assert str(image) == "Attribution by saliency per feature: 3 examples, 2 class, 'x' [4, 4]"
