"""The page: whole on its own, escaped, reachable by keyboard, and its pictures are pictures."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image as Pillow

from gradreg.experiments.page import Card, Image, Question, Text, page, png

EVIL = '<script>alert("1")</script>'
VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.texts = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag == "a":
            self.links.append(attributes["href"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def written():
    pixels = np.arange(12.0).reshape(3, 4)
    questions = [
        Question(
            Card("test 0", Image(pixels), "7"),
            [Card("row 3", Image(np.zeros((2, 2, 3))), "7", 1.25)],
            [Card(EVIL, Text([EVIL, "b", "c"], [0.5, -1.0, None]), EVIL, -0.5)],
        ),
        Question(Card("test 1", Text(["x", "&"]))),
    ]
    return page(f"Title {EVIL}", questions, [("rows", EVIL)])


def test_well_formed_and_escaped(written):
    reader = Reader()
    reader.feed(written)
    assert reader.open == []
    assert not [tag for tag, _ in reader.tags if tag in ("script", "link", "iframe")]
    assert "".join(reader.texts).count(EVIL) >= 5  # shown as text
    assert len(set(reader.ids)) == len(reader.ids)
    assert {link.removeprefix("#") for link in reader.links} <= set(reader.ids)


def test_nothing_is_fetched(written):
    assert "://" not in written
    assert "url(" not in written
    assert all(attributes["src"].startswith("data:") for tag, attributes in _tags(written) if tag == "img")


def test_light_and_dark_and_alternatives(written):
    assert "prefers-color-scheme: dark" in written
    assert all(attributes.get("alt") for tag, attributes in _tags(written) if tag == "img")
    assert '<html lang="en">' in written


def test_signs_are_told_by_more_than_color(written):
    assert re.search(r'token for" style="--strength:35%" title="\+0.5"', written)
    assert re.search(r'token against" style="--strength:70%" title="-1"', written)
    assert "underline dashed" in written
    assert "<td>b</td><td>-1</td>" in written


@pytest.mark.parametrize("shape", [(3, 5), (4, 2, 3)])
def test_pictures_are_what_they_show(shape):
    pixels = np.random.default_rng(0).normal(size=shape)
    with Pillow.open(io.BytesIO(png(pixels))) as picture:
        found = np.asarray(picture)
    low, high = pixels.min(), pixels.max()
    assert np.array_equal(found, np.round(255 * (pixels - low) / (high - low)).astype(np.uint8))


def test_a_constant_picture_and_a_wrong_one():
    with Pillow.open(io.BytesIO(png(np.ones((2, 2))))) as picture:
        assert np.asarray(picture).tolist() == [[0, 0], [0, 0]]
    with pytest.raises(ValueError, match=r"shape \[2, 2, 4\]"):
        png(np.ones((2, 2, 4)))


def test_pictures_are_inside(written):
    source = next(attributes["src"] for tag, attributes in _tags(written) if tag == "img")
    with Pillow.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) as picture:
        assert picture.size == (4, 3)


def _tags(text):
    reader = Reader()
    reader.feed(text)
    return reader.tags
