"""The public names are frozen in api_surface.json; every one says what it is and shows it."""

from __future__ import annotations

import doctest
import inspect
import json
import types
from pathlib import Path
from typing import Any

import pytest

import gradreg

SURFACE: dict[str, list[str]] = json.loads((Path(__file__).parent / "api_surface.json").read_text())
NAMES = sorted(gradreg.__all__)
CALLABLES = [name for name in NAMES if not isinstance(getattr(gradreg, name), types.ModuleType)]


def has_example(thing: Any) -> bool:
    return bool(doctest.DocTestParser().get_examples(inspect.getdoc(thing) or ""))


def test_the_surface_is_frozen() -> None:
    """Removing or adding a name means editing api_surface.json in the same change."""
    assert SURFACE["gradreg"] == NAMES
    assert len(NAMES) == len(set(gradreg.__all__))


@pytest.mark.parametrize("module", sorted(set(SURFACE) - {"gradreg"}))
def test_the_surface_of_submodules_is_frozen(module: str) -> None:
    found = getattr(gradreg, module.removeprefix("gradreg."))
    assert sorted(found.__all__) == SURFACE[module]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists_and_is_documented(name: str) -> None:
    thing = getattr(gradreg, name)
    documentation = inspect.getdoc(thing)
    assert documentation
    assert documentation.splitlines()[0].strip().endswith((".", ":", "$."))


# Errors are raised, not called; bases and plain descriptions are shown where they are used
WITHOUT_EXAMPLE = (BaseException,)


@pytest.mark.parametrize("name", CALLABLES)
def test_every_function_and_class_shows_an_example(name: str) -> None:
    thing = getattr(gradreg, name)
    if inspect.isclass(thing) and issubclass(thing, WITHOUT_EXAMPLE):
        return
    assert has_example(thing), f"{name} has no >>> example"


@pytest.mark.parametrize("name", sorted(name for name in NAMES if isinstance(getattr(gradreg, name), types.ModuleType)))
def test_every_public_name_of_a_public_module_is_documented(name: str) -> None:
    module = getattr(gradreg, name)
    for inner in module.__all__:
        thing = getattr(module, inner)
        if inspect.isclass(thing) or inspect.isfunction(thing):  # type aliases have no place for a docstring
            assert inspect.getdoc(thing), f"{name}.{inner} has no docstring"


def test_names_come_from_gradreg() -> None:
    for name in CALLABLES:
        assert getattr(gradreg, name).__module__.startswith("gradreg."), name


def test_nothing_else_leaks_out() -> None:
    leaked = {
        name
        for name, value in vars(gradreg).items()
        if not name.startswith("_") and name not in gradreg.__all__ and not isinstance(value, types.ModuleType)
    }
    assert not leaked


def test_the_package_is_typed() -> None:
    assert (Path(gradreg.__file__).parent / "py.typed").exists()


def test_importing_is_light() -> None:
    """What is heavy or optional stays out until it is used."""
    import subprocess
    import sys

    heavy = ["hydra", "omegaconf", "matplotlib", "transformers", "sklearn", "pandas", "torchvision"]
    code = f"import sys, gradreg; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
