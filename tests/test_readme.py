"""Everything in the README is executed: its Python blocks run, its commands compose, its picture and links exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import warnings
from pathlib import Path

import pytest

from tests.experiments.in_process import call

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.strip().splitlines()[-1][:40])
def test_python_blocks_run(code: str) -> None:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*torch.jit.script")  # torch's own, when it loads forward mode
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_comments_with_shapes_are_true() -> None:
    code = next(block for block in blocks("python") if "jacobian" in block)
    names: dict[str, object] = {"__name__": "readme"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "README.md", "exec"), names)
    assert tuple(names["jacobian"].shape) == (8, 3, 20)  # type: ignore[attr-defined]
    assert tuple(names["per_example"]["0.weight"].shape) == (8, 64, 20)  # type: ignore[index]
    assert tuple(names["sums"].shape) == (8, 3, 5)  # type: ignore[attr-defined]
    assert names["inside"].requires_grad  # type: ignore[attr-defined]


def test_the_two_commands_are_those_that_ci_runs() -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("python3.11")]
    assert len(commands) == 2
    assert commands[0].endswith(".venv/bin/gradreg train")
    assert commands[1].endswith(".venv/bin/pytest")
    assert commands[0].rpartition(" && ")[0] == commands[1].rpartition(" && ")[0]
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("gradreg train")]


@pytest.mark.parametrize("command", COMMANDS)
def test_train_commands_compose(command: str, tmp_path: Path) -> None:
    words = [word for word in shlex.split(command)[1:] if word != "-m"]
    words = [word.replace("seed=0,1,2", "seed=0") for word in words]
    run = call(tmp_path, *words, "--cfg", "job")
    assert run.returncode == 0, run.stderr
    assert "batch_size" in run.stdout


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)#][^)]*)\)", TEXT):
        assert (ROOT / target).exists(), target
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in TEXT.splitlines()
        if line.startswith("#")
    }
    for anchor in re.findall(r"\]\(#([^)]*)\)", TEXT):
        assert anchor in headings, anchor


def test_folders_that_are_named_exist() -> None:
    for name in re.findall(r"^\| (.*?) \|", TEXT, flags=re.MULTILINE):
        for path in re.findall(r"`([\w./]+(?:/|\.py))`", name):
            assert (ROOT / path).exists() or (ROOT / "gradreg" / path).exists(), path


def test_figures_carry_their_command_and_date() -> None:
    for part in ("results", "speed"):
        assert f"<!-- {part} -->" not in TEXT, f"the figures of {part} are missing"
    assert re.search(r"20\d\d-\d\d-\d\d", TEXT)
