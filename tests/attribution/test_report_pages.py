"""Pages and figures of similarity and attention reports; the pages in a real browser."""

from __future__ import annotations

import re
import sys

import pytest
import torch

import gradreg as gr
from gradreg.attribution._elements import visible
from gradreg.attribution.attention import QUANTITIES, AttentionSide
from gradreg.attribution.similarity import Calibration, Divergence, TokenRow
from gradreg.attribution.similarity._pairs import strongest_pairs
from gradreg.attribution.similarity._rows import Candidate, Cell
from gradreg.errors import GradregError
from tests.browser import CONTRAST, browser

EVIL = '</script><img src="https://example.invalid/x" onerror="window.hacked=1"><!-- &lt; $x$'
ROW = "[...document.querySelectorAll('%s tr')].map(r => [...r.children].map(c => c.textContent))"


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


def value(text):
    return float(text.replace("\u2212", "-").replace("%", "e-2"))


def similarity(a=3, b=4, words=None, calibrated=True):
    """A report of random token gradients in two groups."""
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(a + b, size, generator=generator, dtype=torch.float64) for size in (7, 5)]
    whole = torch.cat(parts, 1)
    norms = whole.norm(dim=1).tolist()
    words = words or [f" w{n}" for n in range(a + b)]

    def rows(start, count):
        g = whole[start : start + count].sum(0)
        shares = (whole[start : start + count] @ g / (g @ g)).tolist()
        return tuple(
            TokenRow(
                n, n + start, words[start + n], 0.5 + n, norms[start + n], shares[n], end=n == count - 1, new=n == 1
            )
            for n in range(count)
        )

    cells = tuple(
        Cell(name, "other", (f"{name}.weight",), 10, part @ part.T)
        for name, part in zip((EVIL, "norms"), parts, strict=True)
    )
    reference = {"as given": torch.tensor([0.1, -0.4, 0.3], dtype=torch.float64)}
    calibration = Calibration(3, {"as given": 25.0}, {"as given": 2}, reference, reference, reference)
    return gr.SimilarityReport(
        rows(0, a),
        rows(a, b),
        cells,
        Divergence(1, words[1], words[a + 1], (Candidate(words[1], 1.5, 3),), ()),
        calibration if calibrated else None,
        (EVIL,),
        {"model": EVIL, "versions": {"torch": "2.13"}},
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    report = similarity(words=[" w0", EVIL, "\n", "x" * 200, "", "$", "</s>"])
    path = tmp_path_factory.mktemp("pages") / "similarity.html"
    text = report.to_html(path, title=EVIL, examples=[EVIL, "second"])
    assert path.read_text(encoding="utf-8") == text
    return report, path


def test_the_matrix_sums_to_the_cosine(chromium, pair):
    report, path = pair
    with chromium.tab(path) as tab:
        rows = tab.run(ROW % "[aria-labelledby=pairs]")
        assert rows[0] == ["a \\ b", "x" * 200, "\u2205", "$", "</s>", "sum"]
        assert [row[0] for row in rows[1:]] == ["w0", EVIL, "\u23ce", "sum"]
        found = torch.tensor([[value(cell) for cell in row[1:]] for row in rows[1:]], dtype=torch.float64)
        torch.testing.assert_close(found[:-1, :-1], report.token_pairs, atol=5.1e-4, rtol=0)
        torch.testing.assert_close(found[:-1, -1], report.token_pairs.sum(1), atol=5.1e-4, rtol=0)
        torch.testing.assert_close(found[-1, :-1], report.token_pairs.sum(0), atol=5.1e-4, rtol=0)
        assert found[-1, -1] == pytest.approx(report.cosine, abs=5.1e-4)
        cells = tab.run(
            "[...document.querySelectorAll('[aria-labelledby=pairs] td[title]')].map(c => "
            "[c.className, parseFloat(c.style.getPropertyValue('--strength'))])"
        )
        largest = float(report.token_pairs.abs().max())
        for (name, strength), own in zip(cells, report.token_pairs.flatten().tolist(), strict=True):
            assert name.split() == ["number", "for" if own > 0 else "against"]
            assert strength == pytest.approx(70 * abs(own) / largest, abs=0.06)
        assert tab.complaints == []
        assert tab.requests == []


def test_tokens_are_shaded_by_their_share(chromium, pair):
    report, path = pair
    tokens = (*report.tokens_a, *report.tokens_b)
    with chromium.tab(path) as tab:
        spans = tab.run(
            "[...document.querySelectorAll('.tokens .token')].map(s => "
            "[s.className, parseFloat(s.style.getPropertyValue('--strength')), s.title])"
        )
        largest = max(abs(token.share) for token in tokens)
        for (name, strength, tooltip), token in zip(spans, tokens, strict=True):
            assert ("for" if token.share > 0 else "against") in name.split()
            assert strength == pytest.approx(70 * abs(token.share) / largest, abs=0.06)
            numbers = re.fullmatch(r"(\S+%) of \|G\|², loss (\S+), norm (\S+)", tooltip)
            assert [value(one) for one in numbers.groups()] == pytest.approx(
                [token.share, token.loss, token.norm], rel=6e-4, abs=6e-4
            )
        rows = tab.run(ROW % ".tokens + details tbody")
        assert [[row[1], *row[5:]] for row in rows] == [
            [str(token.position), ", ".join((["new"] if token.new else []) + (["end"] if token.end else []))]
            for token in tokens
        ]


def test_all_other_parts_of_a_similarity(chromium, pair):
    report, path = pair
    with chromium.tab(path) as tab:
        found = {row[0]: row for row in tab.run(ROW % "[aria-labelledby=what-ifs] tbody")}
        assert set(found) == set(report.what_ifs)
        for name, one in report.what_ifs.items():
            assert value(found[name][1]) == pytest.approx(one.cosine, abs=5.1e-5)
        assert found["without the end token"][4] == "a: \u23ce; b: </s>"
        groups = {row[0]: row[1:] for row in tab.run(ROW % "[aria-labelledby=groups] > .scroll tbody")}
        for group in report.groups:
            expected = [10, group.share_a, group.share_b, group.cosine, group.contribution]
            assert [value(one) for one in groups[group.name]] == pytest.approx(expected, abs=6e-4)
        assert tab.run(ROW % "[aria-labelledby=calibration] tbody")[0][2:4] == ["25 % of pairs", "2 of 4"]
        assert tab.run(ROW % "[aria-labelledby=divergence] tbody") == [[EVIL, "a", "1.5", "3"]]
        advice = tab.run("document.querySelector('[aria-labelledby=advice] p').textContent")
        assert advice == report.recommendation
        assert EVIL in tab.run("document.querySelector('footer table').textContent")
        assert tab.run("document.querySelector('h1').textContent") == EVIL
        assert tab.run("document.querySelector('h3').textContent") == f"a: {EVIL}"
        assert tab.run("window.hacked === undefined && document.images.length === 0 && document.scripts.length === 0")


def test_long_texts_keep_their_strongest_tokens():
    report = similarity(90, 85, calibrated=False)
    pairs = strongest_pairs(report, 80)
    assert pairs.values.shape == (81, 81)
    assert float(pairs.values.sum()) == pytest.approx(report.cosine, abs=1e-12)
    mass = report.token_pairs.abs().sum(1)
    assert set(pairs.places_a) == set(mass.topk(80).indices.tolist())
    torch.testing.assert_close(pairs.values[:80, :80], report.token_pairs[pairs.places_a][:, pairs.places_b])
    text = report.to_html()
    assert text.count("all others</th>") == 2
    assert len(text) < 2_000_000
    axes = report.plot().axes[0]
    assert axes.images[0].get_array().shape == (41, 41)
    assert axes.get_yticklabels()[-1].get_text() == "50 others"


def test_one_target_a_side():
    pairs = [(torch.randn(1, 3), torch.tensor([label])) for label in (0, 2)]
    report = gr.explain_similarity(torch.nn.Linear(3, 4), *pairs)
    assert 'id="pairs"' not in report.to_html()
    with pytest.raises(GradregError, match="has to be two names"):
        report.to_html(examples=["one"])


def test_the_figure_of_a_similarity(tmp_path):
    pytest.importorskip("matplotlib")
    sys.modules.pop("matplotlib.pyplot", None)
    report = similarity(words=["a", "日", "\n", "x" * 200, "", "$x$", "</s>"])
    figure = report.plot(tmp_path / "new" / "a.png", title="$x$\n日")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
    matrix, bars, _ = figure.axes
    torch.testing.assert_close(torch.tensor(matrix.images[0].get_array()), report.token_pairs)
    assert [tick.get_text() for tick in matrix.get_yticklabels()] == ["a", "\\u65e5", "⏎"]
    assert [tick.get_text() for tick in matrix.get_xticklabels()] == ["x" * 15 + "…", "∅", "$x$", "</s>"]
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([one.cosine for one in report.what_ifs.values()])
    assert [tick.get_text() for tick in bars.get_yticklabels()] == list(report.what_ifs)
    assert "matplotlib.pyplot" not in sys.modules


TARGETS = (2, 3)


def attention():
    """A report with maps of two sorts, and two axes of targets."""
    generator = torch.Generator().manual_seed(7)
    sides = {}
    for name, kinds in (("encoder", ("[CLS]", EVIL)), ("cross", ("[CLS]", "other", "dots"))):
        shape = (2, 3, len(kinds))
        table = {
            quantity: torch.randn(*shape, *TARGETS, generator=generator, dtype=torch.float64) * 1e-5
            for quantity in QUANTITIES
        }
        table["attention"] = torch.rand(*shape, generator=generator)
        for quantity in ("gradient", "centered_gradient", "score_gradient"):
            table[quantity] = table[quantity].abs()
        table["score_gradient"][0, 0, 0] = 1.0  # outgrows all others
        table["signed_gradient"][1, 2, 0] = float("nan")
        pairs = torch.full(shape, 12)
        pairs[1, :, 1] = 0
        maps = tuple(f"{name}.{EVIL}.{n}:attention" for n in range(2))
        sides[name] = AttentionSide(name, (0, 4), maps, kinds, (EVIL,), table, pairs, torch.full((2, 3), 5))
    return gr.AttentionReport(sides, of=EVIL, model="Tiny", examples=2, provenance={"model": EVIL})


@pytest.fixture(scope="module")
def maps(tmp_path_factory):
    report = attention()
    path = tmp_path_factory.mktemp("pages") / "attention.html"
    assert report.to_html(path) == path.read_text(encoding="utf-8")
    return report, path


def choose(tab, name, option):
    tab.run(
        f"(s => {{ s.value = '{option}'; s.dispatchEvent(new Event('change')); }})(document.getElementById('{name}'))"
    )


def shown_tables(tab):
    return tab.run(
        "[...document.querySelectorAll('.kinds section')].map(s => [s.querySelector('h3').textContent, "
        "[...s.querySelectorAll('tbody tr')].map(r => [...r.children].map(c => c.textContent))])"
    )


def agrees(tab, side, values, power):
    """Tables have the values `[layers, heads, kinds]`, in units of 10^power, and their mean over heads."""
    for kind, (name, rows) in enumerate(shown_tables(tab)):
        assert name == side.kinds[kind]
        assert [row[0] for row in rows] == ["0", "4"]
        for row, layer, pairs in zip(rows, values[:, :, kind].double(), side.pairs[:, :, kind], strict=True):
            cells = [None if cell == "-" else value(cell) for cell in row[1:]]
            if not pairs.any():
                assert cells == [None] * 4
                continue
            expected = [float(layer.mean()), *layer.tolist()]
            assert cells == pytest.approx([one / 10**power for one in expected], abs=5.1e-3, nan_ok=True)


def test_quantity_maps_and_target_are_chosen(chromium, maps):
    report, path = maps
    encoder, cross = report.sides.values()
    with chromium.tab(path) as tab:
        agrees(tab, encoder, encoder.table["attention"], 0)
        status = "document.querySelector('.status').textContent"
        assert tab.run(status) == "Shown: encoder attention, attention"
        choose(tab, "side", 1)
        choose(tab, "quantity", QUANTITIES.index("gradient"))
        agrees(tab, cross, cross.table["gradient"].flatten(3).mean(3), -5)
        assert tab.run(status) == ("Shown: cross attention, gradient, target all, all (mean), in units of 1e\u22125")
        choose(tab, "target-1", 3)
        agrees(tab, cross, cross.table["gradient"][..., 2].mean(3), -5)
        choose(tab, "target-0", 2)
        agrees(tab, cross, cross.table["gradient"][..., 1, 2], -5)
        choose(tab, "quantity", QUANTITIES.index("joint_score_gradient"))
        agrees(tab, cross, cross.table["joint_score_gradient"][..., 1, 2], -5)
        classes = tab.run("[...document.querySelectorAll('.kinds td')].map(c => [c.textContent, c.className])")
        for text, name in classes:
            assert ("against" in name) == ((text.startswith("\u2212") and value(text) != 0) or text == "\u22120.00")
        choose(tab, "quantity", QUANTITIES.index("signed_gradient"))
        assert shown_tables(tab)[0][1][1][4] == "nan"
        assert tab.complaints == []
        assert tab.requests == []


def test_the_chart_has_a_mark_for_every_head(chromium, maps):
    report, path = maps
    side = report.sides["cross"]
    with chromium.tab(path) as tab:
        choose(tab, "side", 1)
        heights = tab.run(
            "[...document.querySelectorAll('.chart .dot')].map(d => +d.getAttribute('transform').split(/[ )]/)[1])"
        )
        values = torch.cat(
            [side.table["attention"][side.pairs[:, 0, kind] > 0][:, :, kind].flatten() for kind in range(3)]
        )
        assert [(252 - height) / 240 for height in heights] == pytest.approx(values.tolist(), abs=1e-5)
        assert tab.run("document.querySelectorAll('.chart .middle').length") == 5  # one kind is in one layer alone
        assert tab.run("[...document.querySelectorAll('.legend li')].map(l => l.textContent.trim())") == list(
            side.kinds
        )
        choose(tab, "quantity", QUANTITIES.index("score_gradient"))
        assert "logarithmic" in tab.run("document.querySelector('figcaption').textContent")
        choose(tab, "quantity", QUANTITIES.index("signed_gradient"))
        assert not tab.run("document.querySelector('.chart').outerHTML.includes('NaN')")
        assert "logarithmic" not in tab.run("document.querySelector('figcaption').textContent")
        assert tab.run("window.hacked === undefined && document.images.length === 0")
        assert tab.complaints == []


def test_too_many_numbers_for_a_page():
    side = attention().sides["cross"]
    table = {"attention": side.table["attention"], "gradient": torch.zeros(1).expand(2, 3, 3, 60_000)}
    large = gr.AttentionReport({"cross": AttentionSide(**{**vars(side), "table": table})})
    with pytest.raises(GradregError, match=r"1080018 numbers of 60000 targets.*\.target\(0\)"):
        large.to_html()
    assert large.target(0).to_html()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("which", ["pair", "maps"])
def test_everything_can_be_read(chromium, request, which, dark):
    _, path = request.getfixturevalue(which)
    with chromium.tab(path, dark=dark) as tab:
        tab.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        for quantity in range(len(QUANTITIES) if which == "maps" else 1):
            if which == "maps":
                choose(tab, "quantity", quantity)
            found = tab.run(CONTRAST)
            assert len(found) > 40
            assert min(found)[0] >= 4.5, min(found)
        assert (found[0][2] < 0.05) == dark


@pytest.mark.parametrize("which", ["pair", "maps"])
def test_a_phone_and_a_keyboard(chromium, request, which):
    _, path = request.getfixturevalue(which)
    with chromium.tab(path, width=320) as tab:
        tab.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert tab.run("document.documentElement.scrollWidth") <= 320
        wide = tab.run(
            "[...document.querySelectorAll('table, svg.chart')].filter(t => !t.closest('.scroll[tabindex]')).length"
        )
        assert wide == 0
        expected = tab.run("document.querySelectorAll('a, select, summary, .scroll').length")
        reached = set()
        for _ in range(expected):
            tab.press("Tab")
            place = "[...document.querySelectorAll('a, select, summary, .scroll')].indexOf(document.activeElement)"
            reached.add(tab.run(place))
        assert reached == set(range(expected))
        assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        nodes = tab.send("Accessibility.getFullAXTree")["nodes"]
        named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n.get("ignored")]
        roles = ("combobox", "link", "heading", "region", "image", "img")
        assert all(name for role, name in named if role in roles), named
        assert tab.run("[...document.querySelectorAll('.scroll')].every(s => s.getAttribute('aria-label'))")
        assert {"main", "heading", "group"} <= {role for role, _ in named}


def test_letters_that_turn_the_direction_are_shown_as_codes():
    assert visible("a\u202eb\x07") == "a⟨202E⟩b⟨0007⟩"
    assert visible(" \n") == "␣⏎"
