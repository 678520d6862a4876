from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from gradreg.errors import GradregError, UnknownNameError, closest
from gradreg.wrt import Activations, Features, Inputs, Outputs, Params, as_wrt, compile_glob, match_names

NAMES = ["weight", "base.0.weight", "base.0.bias", "base.2.weight", "heads.0.0.weight", "heads.10.0.weight"]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("*", NAMES),
        ("**", NAMES),
        ("base.*", []),
        ("base.*.*", ["base.0.weight", "base.0.bias", "base.2.weight"]),
        ("base.**", ["base.0.weight", "base.0.bias", "base.2.weight"]),
        ("**.weight", [name for name in NAMES if name.endswith("weight")]),
        ("*.weight", []),
        ("**.0.weight", ["base.0.weight", "heads.0.0.weight", "heads.10.0.weight"]),
        ("heads.?.0.weight", ["heads.0.0.weight"]),
        ("heads.*.0.weight", ["heads.0.0.weight", "heads.10.0.weight"]),
        ("base.0.bias", ["base.0.bias"]),
        ("base.0", []),
        ("basex0.bias", []),
        ("base[.]0.bias", []),
        ("BASE.**", []),
        ("weigh?", ["weight"]),
        ("base**weight", ["base.0.weight", "base.2.weight"]),
    ],
)
def test_globs(glob: str, expected: list[str]) -> None:
    if expected:
        assert match_names(glob, NAMES, "parameter") == expected
    else:
        with pytest.raises(UnknownNameError, match="No parameter matches"):
            match_names(glob, NAMES, "parameter")


def naive_match(glob: list[str], name: list[str]) -> bool:
    """Match segment by segment: `**` is any number of segments, `*` one segment."""
    if not glob:
        return not name
    if glob[0] == "**":
        return any(naive_match(glob[1:], name[start:]) for start in range(len(name) + 1))
    return bool(name) and glob[0] in ("*", name[0]) and naive_match(glob[1:], name[1:])


SEGMENT = st.sampled_from(["a", "b", "layer", "0", "10"])


@settings(max_examples=300, deadline=None)
@given(
    glob=st.lists(SEGMENT | st.sampled_from(["*", "**"]), min_size=1, max_size=5),
    name=st.lists(SEGMENT, min_size=1, max_size=5),
)
def test_globs_agree_with_matching_segment_by_segment(glob: list[str], name: list[str]) -> None:
    if glob[-1] == "**" and len(glob) > 1:
        glob = [*glob, "*"]  # "a.**" needs something behind the dot
        expected = naive_match(glob, name)
        glob = glob[:-1]
    else:
        expected = glob == ["*"] or naive_match(glob, name)
    assert bool(compile_glob(".".join(glob)).fullmatch(".".join(name))) == expected


@settings(max_examples=60, deadline=None)
@given(name=st.text(alphabet="ab.[](){}+^$|\\#0", min_size=1, max_size=12))
def test_a_name_matches_itself_only(name: str) -> None:
    assert match_names(name, [name, name + "x", "x" + name], "module") == [name]


def test_the_closest_names_are_listed() -> None:
    with pytest.raises(UnknownNameError, match=r"'base\.0\.weight'") as caught:
        match_names("base.0.wieght", NAMES, "parameter")
    assert "**" not in str(caught.value)
    with pytest.raises(UnknownNameError, match=r"\*\* crosses"):
        match_names("base.*", NAMES, "parameter")
    with pytest.raises(UnknownNameError, match="there are none"):
        match_names("x", [], "parameter")


def test_closest_is_short() -> None:
    assert closest("x", [f"name{position}" for position in range(50)]).endswith("(and 45 more)")


def test_one_description_or_a_tuple() -> None:
    assert as_wrt(Inputs()) == (Inputs(),)
    assert as_wrt([Inputs(), Features(), Outputs()]) == (Inputs(), Features(), Outputs())
    assert as_wrt((Params("a"), Activations("b", batch_axis=1)))[1].batch_axis == 1


def test_descriptions_are_values() -> None:
    assert len({Params("a"), Params("a"), Params("b"), Activations("a"), Activations("a", 1), Inputs("a")}) == 5


@pytest.mark.parametrize("wrt", [(), "inputs", None, Params, (Inputs(), Features), 3], ids=str)
def test_refused(wrt: object) -> None:
    with pytest.raises(GradregError, match="wrt"):
        as_wrt(wrt)


def test_a_class_in_the_place_of_an_instance() -> None:
    with pytest.raises(GradregError, match=r"Did you mean Features\(\)"):
        as_wrt(Features)
