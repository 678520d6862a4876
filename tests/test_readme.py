"""README and docs are executed: Python blocks run and print what they say, commands compose, pictures and links exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import warnings
from pathlib import Path

import pytest

from gradreg.experiments.cli import COMMANDS as COMMAND_TABLE
from tests.experiments.in_process import call

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
# A Python block, and what it prints where a text block follows it
EXAMPLES = [
    pytest.param(code, printed, id=f"{page}: {code.strip().splitlines()[-1][:40]}")
    for page, text in PAGES.items()
    for code, printed in re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", text, flags=re.DOTALL)
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_python_blocks_run_and_print_what_they_say(code: str, printed: str) -> None:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as output:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*torch.jit.script")  # torch's own, when it loads forward mode
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    if printed:
        assert output.getvalue() == printed


def test_every_printed_text_belongs_to_a_block_that_runs() -> None:
    assert sum(text.count("```text") for text in PAGES.values()) == sum(bool(item.values[1]) for item in EXAMPLES)
    assert any("check_double_backward" in item.values[0] and "Remedy:" in item.values[1] for item in EXAMPLES)


def test_comments_with_shapes_are_true() -> None:
    code = next(block for block in blocks("python") if "jacobian" in block)
    names: dict[str, object] = {"__name__": "readme"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "README.md", "exec"), names)
    assert tuple(names["jacobian"].shape) == (8, 3, 20)
    assert tuple(names["per_example"]["0.weight"].shape) == (8, 64, 20)
    assert tuple(names["sums"].shape) == (8, 3, 5)
    assert names["inside"].requires_grad


def test_the_two_commands_are_those_that_ci_runs() -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("python3.11")]
    assert len(commands) == 2
    assert commands[0].endswith(".venv/bin/gradreg train")
    assert commands[1].endswith(".venv/bin/pytest")
    assert commands[0].rpartition(" && ")[0] == commands[1].rpartition(" && ")[0]
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


COMMANDS = [
    line
    for block in blocks("sh")
    for line in block.splitlines()
    if re.match("gradreg (train|study|check|index|query|similarity|attribute|attention)( |$)", line)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command: str, tmp_path: Path) -> None:
    words = [word for word in shlex.split(command)[1:] if word != "-m"]
    words = [word.replace("seed=0,1,2", "seed=0") for word in words]
    run = call(tmp_path, *words, "--cfg", "job")
    assert run.returncode == 0, run.stderr
    assert {
        "train": "batch_size",
        "study": "learning_rate",
        "check": "examples",
        "index": "shard_rows",
        "query": "image_shape",
        "similarity": "stop_share",
        "attribute": "baseline",
        "attention": "max_length",
    }[words[0]] in run.stdout


def test_every_command_is_in_the_table() -> None:
    rows = re.findall(r"^\| `gradreg ([\w-]+)` \| (.*) \|$", TEXT, flags=re.MULTILINE)
    assert rows == [(name, command.summary) for name, command in COMMAND_TABLE.items()]


def test_links_and_pictures_exist() -> None:
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#][^)]*)\)", re.sub(r"\$`.*?`\$", "", text)):  # formulas have brackets too
            assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), f"{page}: {target}"
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
