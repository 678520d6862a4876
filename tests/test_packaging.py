"""pyproject.toml says what is in the tree."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import gradreg

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
ON_REQUEST = {"bench", "faiss", "models"}  # extras outside "all", which nothing here needs
PLACES = {"gradreg": "gradreg", "conf": "gradreg.conf", "experiments": "gradreg.experiments"}


def packages_in_the_tree() -> set[str]:
    found = set()
    for folder, package in PLACES.items():
        for path in (ROOT / folder).rglob("__init__.py"):
            inner = path.parent.relative_to(ROOT / folder).parts
            found.add(".".join([package, *inner]))
    return found


def test_packages_are_those_of_the_tree() -> None:
    assert set(SETUPTOOLS["packages"]) == packages_in_the_tree()
    assert len(SETUPTOOLS["packages"]) == len(set(SETUPTOOLS["packages"]))


def test_every_python_file_lies_in_a_package() -> None:
    for folder in PLACES:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def test_package_directories() -> None:
    assert {package: folder for folder, package in PLACES.items()} == SETUPTOOLS["package-dir"]


def test_configuration_is_yaml_only() -> None:
    files = {path.name for path in (ROOT / "conf").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert all(name.endswith(".yaml") or name == "__init__.py" for name in files)
    assert SETUPTOOLS["package-data"]["gradreg.conf"] == ["**/*.yaml"]


def test_files_beside_the_code_are_installed() -> None:
    for path in (ROOT / "gradreg").rglob("*"):
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts:
            package = ".".join(path.parent.relative_to(ROOT).parts)
            patterns = SETUPTOOLS["package-data"].get(package, [])
            assert any(path.match(pattern) for pattern in patterns), path


def test_versions_agree() -> None:
    assert PROJECT["project"]["version"] == gradreg.__version__ == metadata.version("gradreg")


def test_every_dependency_is_bounded_and_says_why() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    for requirement in (item for group in groups for item in group):
        if requirement.startswith("gradreg["):
            continue
        assert re.fullmatch(r"[\w-]+>=[\d.]+,<[\d.]+", requirement), requirement
        (line,) = [line for line in text.splitlines() if f'"{requirement}"' in line]
        assert "#" in line, f"{requirement} has no comment"


def test_all_is_the_union_of_the_extras() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    names = re.fullmatch(r"gradreg\[(.*)\]", extras["all"][0])
    assert names is not None
    assert set(names[1].split(",")) == set(extras) - {"all"} - ON_REQUEST


def test_files_that_a_release_needs() -> None:
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "gradreg/py.typed"):
        assert (ROOT / name).exists(), name


def test_constraints_pin_every_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {
        line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line and not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"]
    groups = [PROJECT["project"]["dependencies"], *(extras[name] for name in extras if name not in ON_REQUEST)]
    wanted = {re.split(r"[>=<\[]", item)[0].lower() for group in groups for item in group} - {"gradreg"}
    assert wanted <= pinned


def test_the_command_exists() -> None:
    scripts = metadata.entry_points(group="console_scripts")
    (command,) = [script for script in scripts if script.name == "gradreg"]
    assert callable(command.load())


def test_the_change_log_names_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"[{gradreg.__version__}]" in text or "[Unreleased]" in text
