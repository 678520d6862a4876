"""The validator's parts: finding targets, and judging plain values by annotations."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import pytest
import torch

from gradreg.experiments.locate import LocateError, locate
from gradreg.experiments.validate import target_problems
from gradreg.experiments.value_types import mismatch

T = TypeVar("T")


def receiver(
    number: float,
    count: int,
    flag: bool,
    word: Literal["cosine", "dot"],
    some: float | None,
    either: float | torch.Tensor,
    anything: Any,
    generic: T,
    unknown,
    many: list[int],
):
    """Take arguments of all kinds."""


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("number", [1, 1.5], ["1", True]),
        ("count", [1], [1.5, "1", True]),
        ("flag", [True], [1, "yes"]),
        ("word", ["dot"], ["cosin", 1]),
        ("some", [None, 1], ["x"]),
        ("either", [1.0, True], ["x"]),
        ("anything", [1, "x", None], []),
        ("generic", [1, "x"], []),
        ("unknown", [1, "x"], []),
        ("many", [[1], 1], ["x"]),
    ],
)
def test_values_are_judged_by_annotations(key, good, bad):
    assert [value for value in good if mismatch(value, key, receiver)] == []
    assert [value for value in bad if not mismatch(value, key, receiver)] == []


def test_closest_literal():
    assert mismatch("cosin", "word", receiver) == "'cosin' is not allowed. Closest: 'cosine' (and 1 more)."


def test_locate():
    assert locate("torch.optim.Adam") is torch.optim.Adam
    assert locate("torch.nn.functional.softplus") is torch.nn.functional.softplus
    assert locate("json.dumps", ("json",)).__name__ == "dumps"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("json.dumps", "Add the prefix of your own package"),
        ("torchvision.models.resnet18", "not allowed"),
        ("torch.nn.Lineer", "Closest: 'Linear'"),
        ("torch.optimm.Adam", "torch has no 'optimm'"),
        ("gradreg.regularizers.DiverseHead", "Closest: 'DiverseHeads'"),
        ("torch.__version__", "cannot be called"),
        ("torch.hub.urlopen", "comes from 'urllib.request'"),
    ],
)
def test_locate_refuses(name, expected):
    with pytest.raises(LocateError, match=expected):
        locate(name)


def test_nested_targets_in_lists_are_checked():
    node = {"arms": {"a": {"base": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.Relu"}]}}}}
    (problem,) = target_problems(node)
    assert problem.startswith("arms.a.base._args_.0._target_: torch.nn has no 'Relu'")


def test_missing_arguments():
    assert target_problems({"head": {"_target_": "torch.nn.Linear", "in_features": 3}}) == [
        "head.out_features: torch.nn.Linear requires the argument 'out_features'."
    ]
    assert not target_problems({"head": {"_target_": "torch.nn.Linear", "_args_": [3, 4]}})
    assert not target_problems({"heads": {"_target_": "gradreg.experiments.heads.mlp_heads", "_partial_": True}})
