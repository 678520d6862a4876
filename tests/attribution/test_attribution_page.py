"""The page of an attribution, in a real browser: what is chosen is what is shown, by mouse and by keyboard."""

from __future__ import annotations

import json
import re

import pytest
import torch

import gradreg as gr
from gradreg.attribution.web import script_data
from gradreg.errors import GradregError
from gradreg.experiments.page import Card, Question, Text, page
from tests.browser import CONTRAST, browser

EVIL = '</script><img src="https://example.invalid/x" onerror="window.hacked=1"><!-- \u2028 &lt; '
CLASSES = ["O", "B-PER", EVIL]
WORDS = [["[CLS]", " Ada", "wrote", EVIL, "\n", "[SEP]"], ["[CLS]", "long", "ago", "[SEP]", "[PAD]", "[PAD]"]]
STEP = 5.6e-3  # three digits of half-precision shares


@pytest.fixture(scope="module")
def attribution():
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 6, 3, 6, generator=generator, dtype=torch.float64)
    scores *= 10.0 ** torch.arange(-2, 1)[:, None]  # classes of different scale
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1, 4:] = False
    scores = scores.masked_fill(~valid[:, None, None], 0)
    scores[0, 0, 0, 1] = float("nan")
    scores[0, 0, 1] = 0
    return gr.Attribution(
        {"embeddings": scores},
        "integrated_gradients",
        "token",
        target_axes=("token", "class"),
        change=scores.sum(-1) - 0.01,
        delta=torch.full((2, 6, 3), 0.01),
        error=torch.full((2, 6, 3), 0.002),
        valid={"embeddings": valid},
        labels={"embeddings": WORDS},
        target_labels={"class": CLASSES},
        provenance={"model": EVIL, "versions": {"torch": "2.13"}},
    )


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def file(attribution, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "a.html"
    attribution.to_html(path, title=EVIL)
    return path


def shown(tab, example=0):
    """Score, sign and strength of every token of an example, as the page has them."""
    spans = tab.run(
        f"[...document.querySelectorAll('#example-{example} .tokens .token')].map(s => "
        "[s.title, s.className, s.style.getPropertyValue('--strength')])"
    )
    scores = [float(title.replace("\u2212", "-")) if "not" not in title else None for title, _, _ in spans]
    return scores, [name for _, name, _ in spans], [float(strength.rstrip("%")) for _, _, strength in spans]


def agrees(tab, attribution, example, token, own_class):
    scores, names, strengths = shown(tab, example)
    real = attribution.valid["embeddings"][example]
    expected = attribution.scores[example, token, own_class][real].tolist()
    largest = max(abs(one) for one in expected if one == one) or 1.0
    assert len(scores) == len(expected)
    for score, name, strength, value in zip(scores, names, strengths, expected, strict=True):
        if value != value:
            assert score is None
            assert "unknown" in name
            continue
        assert score == pytest.approx(value, rel=STEP, abs=1e-12)
        assert ("for" in name.split(), "against" in name.split()) == (value > 0, value < 0)
        assert strength == pytest.approx(70 * abs(value) / largest, rel=STEP, abs=0.06)


def choose(tab, own_class, example=0):
    tab.run(
        f"(() => {{ const s = document.querySelector('#example-{example} select'); s.value = '{own_class}';"
        " s.dispatchEvent(new Event('change')); })()"
    )


def test_what_is_chosen_is_shown(chromium, file, attribution):
    with chromium.tab(file) as tab:
        agrees(tab, attribution, 0, 0, 0)
        tab.click("#example-0 .choice input", 2)
        agrees(tab, attribution, 0, 2, 0)
        choose(tab, 1)
        agrees(tab, attribution, 0, 2, 1)
        agrees(tab, attribution, 1, 0, 0)  # the other example stays as it was
        tab.click("#example-1 .choice input", 3)
        choose(tab, 2, example=1)
        agrees(tab, attribution, 1, 3, 2)
        status = tab.run("document.querySelector('#example-1 .status').textContent")
        assert status.startswith("Shown: token 3: [SEP], class 2: </script>")
        assert tab.complaints == []
        assert tab.requests == []


def test_numbers_of_the_target(chromium, file, attribution):
    with chromium.tab(file) as tab:
        tab.click("#example-0 .choice input", 3)
        choose(tab, 2)
        facts = dict(
            tab.run(
                "[...document.querySelectorAll('#example-0 dl div')].map(d => [...d.children].map(c => c.textContent))"
            )
        )
        total, change = float(attribution.total[0, 3, 2]), float(attribution.change[0, 3, 2])
        share = r" \((\S+)\xa0%\)"
        found = float(facts["Sum of scores"].replace("\u2212", "-"))
        assert found == pytest.approx(total, rel=STEP)
        assert float(facts["Change of the target"].replace("\u2212", "-")) == pytest.approx(change, rel=STEP)
        assert re.fullmatch(r"\+0\.01" + share, facts["Gap between the two"])
        percent = re.fullmatch(r"0\.002" + share, facts["Estimated error"])
        assert float(percent[1]) == pytest.approx(100 * 0.002 / abs(change), rel=0.05)


def test_the_keyboard_reaches_everything(chromium, file, attribution):
    focused = "(e => [e.tagName, e.type || '', e.id])(document.activeElement)"
    with chromium.tab(file) as tab:
        reached = []
        for _ in range(12):
            tab.press("Tab")
            reached.append(tab.run(focused))
        kinds = [kind for kind, _, _ in reached]
        assert reached[0][0] == "A"  # skips to the examples
        assert ["INPUT", "checkbox", "common"] in reached
        assert kinds.count("A") == 3
        assert [kind for kind in kinds if kind in ("INPUT", "SELECT", "SUMMARY")] == [
            "INPUT", "INPUT", "SELECT", "SUMMARY", "INPUT", "SELECT", "SUMMARY", "SUMMARY",
        ]  # fmt: skip
        tab.run("document.querySelector('#example-0 .choice input').focus()")
        tab.press("ArrowRight")
        agrees(tab, attribution, 0, 1, 0)
        outline = "getComputedStyle(document.activeElement.nextElementSibling).outlineStyle"
        assert tab.run(outline) == "solid"
        for _ in range(2):
            tab.press("ArrowLeft")
        agrees(tab, attribution, 0, 5, 0)  # around to the last
        tab.press("Tab")
        assert tab.run(focused)[0] == "SELECT"
        assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        tab.press("ArrowDown")
        agrees(tab, attribution, 0, 5, 1)
        tab.press("Tab")
        assert tab.run("document.querySelector('#example-0 table')") is None
        tab.press("Enter")
        tab.run("new Promise(done => setTimeout(done, 50))")
        rows = tab.run(
            "[...document.querySelectorAll('#example-0 tbody tr')].map(r => [...r.children].map(c => c.innerText))"
        )
        assert [row[0] for row in rows] == list("012345")
        assert [row[2] for row in rows] == tab.run(
            "[...document.querySelectorAll('#example-0 .tokens .token')].map(s => s.title)"
        )
        assert tab.complaints == []


def test_names_for_screen_readers(chromium, file):
    with chromium.tab(file) as tab:
        nodes = tab.send("Accessibility.getFullAXTree")["nodes"]
        named = [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
        ]
        roles = {role for role, _ in named}
        assert ("combobox", "Target class") in named
        assert ("group", "Target token") in named
        assert ("radio", "Ada") in named
        assert ("region", "Example 1") in named
        assert ("navigation", "Examples") in named
        assert {"main", "heading", "status"} <= roles
        assert all(
            name for role, name in named if role in ("radio", "combobox", "checkbox", "link", "heading", "region")
        )


def test_one_scale_for_all_targets(chromium, file, attribution):
    with chromium.tab(file) as tab:
        tab.click("#example-0 .choice input", 3)
        tab.click("#common")
        values = attribution.scores[0].nan_to_num()
        _, _, strengths = shown(tab)
        largest = float(values.abs().max())
        assert strengths == pytest.approx((70 * values[3, 0].abs() / largest).tolist(), rel=STEP, abs=0.06)


def test_texts_stay_texts(chromium, file):
    with chromium.tab(file) as tab:
        assert tab.run("window.hacked === undefined")
        assert tab.run("document.images.length") == 0
        assert tab.run("document.title").startswith("</script><img")
        assert tab.run("document.querySelector('h1').textContent") == EVIL
        assert tab.run("document.querySelectorAll('#example-0 .tokens .token')[3].textContent") == EVIL.strip()
        assert tab.run("document.querySelector('select').options[2].textContent") == f"2: {EVIL.strip()}"
        assert EVIL in tab.run("document.querySelector('footer table').textContent")
        assert tab.complaints == []
        assert tab.requests == []


def test_letters_that_turn_what_follows_are_shown_as_codes(chromium, tmp_path):
    labels = ["\u202e", "a\u2067", "\x00", "\u0645\u0631\u062d\u0628\u0627", "b"]
    scores = torch.ones(1, len(labels))
    path = tmp_path / "a.html"
    gr.Attribution({"x": scores}, "saliency", "token", labels={"x": [labels]}).to_html(path)
    with chromium.tab(path) as tab:
        found = tab.run("[...document.querySelectorAll('.tokens .token')].map(s => s.textContent)")
        assert found == ["\u27e8202E\u27e9", "a\u27e82067\u27e9", "\u27e80000\u27e9", labels[3], "b"]
        places = tab.run("[...document.querySelectorAll('.tokens .token')].map(s => s.getBoundingClientRect().left)")
        assert places == sorted(places)


def test_nothing_may_be_fetched(chromium, file):
    """The policy of the page itself refuses, whatever a script tries."""
    with chromium.tab(file) as tab:
        refused = "fetch('https://example.invalid/').then(() => 'sent', () => 'refused')"
        assert tab.run(refused) == "refused"
        assert any("Content Security Policy" in one for one in tab.complaints)


@pytest.mark.parametrize("dark", [False, True])
def test_everything_can_be_read(chromium, file, dark):
    with chromium.tab(file, dark=dark) as tab:
        for token in range(6):
            tab.click("#example-0 .choice input", token)
            found = tab.run(CONTRAST)
            assert len(found) > 40
            assert min(found)[0] >= 4.5, min(found)
        assert (tab.run(CONTRAST)[0][2] < 0.05) == dark  # the paper is what was asked for
        assert any("token" in name and "for" in name for _, name, _ in found)


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_of_tracin_can_be_read(chromium, tmp_path, dark):
    card = Card("row 1", Text(["for", "against", "none"], [1.0, -1.0, None]), "label 3", 0.5)
    (tmp_path / "a.html").write_text(page("Answers", [Question(card, [card], [card])], [("rows", "3")]))
    with chromium.tab(tmp_path / "a.html", dark=dark, width=360) as tab:
        assert min(tab.run(CONTRAST))[0] >= 4.5
        assert tab.run("document.documentElement.scrollWidth") <= 360
        assert tab.complaints == []
        assert tab.requests == []


@pytest.mark.parametrize("width", [320, 360, 768])
def test_no_scrolling_sideways(chromium, file, width):
    with chromium.tab(file, width=width) as tab:
        tab.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        tab.run("new Promise(done => setTimeout(done, 50))")
        assert tab.run("document.documentElement.scrollWidth") <= width
        small = tab.run(
            "[...document.querySelectorAll('.choice input, select, summary')].map(e => e.getBoundingClientRect())"
            ".filter(b => b.height < 24 || b.width < 24).length"
        )
        assert small == 0  # can be hit with a finger


def test_source_and_target_prefix(chromium, tmp_path):
    parts = {"encoder": torch.randn(1, 3, 4), "decoder": torch.randn(1, 3, 3)}
    a = gr.Attribution(
        parts,
        "saliency",
        "token",
        target_axes=("token",),
        labels={"encoder": [["a", "b", "c", "</s>"]], "decoder": [["<pad>", "x", "y"]]},
        segments={"encoder": "source", "decoder": "target prefix"},
    )
    a.to_html(tmp_path / "a.html")
    with chromium.tab(tmp_path / "a.html") as tab:
        assert tab.run("[...document.querySelectorAll('h3')].map(h => h.textContent)") == ["Source", "Target prefix"]
        assert tab.run("[...document.querySelectorAll('.choice span')].map(s => s.textContent)") == ["<pad>", "x", "y"]
        tab.click(".choice input", 2)
        scores, _, _ = shown(tab)
        assert scores == pytest.approx(a.scores[0, 2].tolist(), rel=STEP)


def test_without_targets_and_without_labels(chromium, tmp_path):
    a = gr.Attribution({"x": torch.tensor([[0.5, -2.0]])}, "input_x_gradient", "feature")
    a.to_html(tmp_path / "a.html", examples=[EVIL])
    with chromium.tab(tmp_path / "a.html") as tab:
        assert shown(tab)[0] == [0.5, -2.0]
        assert tab.run("document.querySelector('.status').textContent") == "Shown: the only target"
        assert tab.run("document.querySelector('h1').textContent") == "Input x gradient"
        assert tab.run("document.querySelector('h2').textContent") == EVIL
        assert tab.run("document.querySelector('#common').checkVisibility()") is False  # there is one target
        assert tab.complaints == []


def test_large_pages_are_small_and_quick(chromium, tmp_path):
    a = gr.Attribution({"x": torch.randn(1, 128, 20, 128)}, "saliency", "token", target_axes=("token", "class"))
    a.to_html(tmp_path / "a.html")
    assert (tmp_path / "a.html").stat().st_size < 3 * a.scores.numel() + 60_000
    with chromium.tab(tmp_path / "a.html") as tab:
        tab.click(".choice input", 100)
        choose(tab, 19)
        assert shown(tab)[0] == pytest.approx(a.scores[0, 100, 19].tolist(), rel=STEP)


def test_what_is_too_large_or_has_no_line():
    a = gr.Attribution({"x": torch.zeros(1, 1, 1).expand(1, 50_000, 100)}, "saliency", "token", target_axes=("class",))
    with pytest.raises(GradregError, match=r"5000000 scores of 1 examples \(example 1, class 50000\).*select"):
        a.to_html()
    assert a.select("class", range(10)).to_html()
    with pytest.raises(GradregError, match="examples has 2 names; there are 1"):
        a.select("class", [0]).to_html(examples=["a", "b"])
    image = gr.Attribution({"x": torch.ones(1, 4, 4)}, "saliency", "feature")
    with pytest.raises(GradregError, match="only one axis can be shown"):
        image.to_html()


def test_data_in_a_script_element():
    value = {"a": "</script><!--\u2028\u2029&", "b": [1.5, None]}
    text = script_data(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value
