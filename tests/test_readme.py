"""The README is true: its example runs as written, and what it names is there."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import contrastile
from contrastile.backends.registry import BUILT_IN
from contrastile.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.M | re.S)


def run(source: str) -> str:
    """The output of a script."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "the page", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def test_the_example_runs_as_written_and_is_short() -> None:
    (example,) = python_blocks(README)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    assert re.fullmatch(r"loss \d+\.\d+, dscale -?\d+\.\d+, dimage \(1000, 64\)\n", run(example))


@pytest.mark.parametrize("page", ["docs/how-to/graphs.md", "docs/reference/data.md", "docs/how-to/training.md"])
def test_the_pages_examples_run_from_top_to_bottom(page: str) -> None:
    blocks = python_blocks((ROOT / page).read_text(encoding="utf-8"))
    assert blocks
    run("\n".join(blocks))


def test_every_target_of_make_exists() -> None:
    pages = [README, *(path.read_text(encoding="utf-8") for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])]
    named = {
        name for page in pages for name in re.findall(r"^make ([a-z]+)|`make ([a-z]+)`", page, re.M) for name in name
    }
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.M))
    assert {"verify", "test"} <= named - {""} <= targets


def test_the_commands_are_those_of_the_command_line() -> None:
    named = set(re.findall(r"^\| `contrastile ([a-z]+)` \|", README, re.M))
    assert named == set(COMMANDS)
    for module, _ in COMMANDS.values():
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "contrastile", command, "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"contrastile {command}" in done.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/verify.md", "docs/how-to/benchmark.md"])
def test_every_option_on_a_page_is_the_command_s(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    # a command on a line of its own, or at the start of a table row
    lines = re.findall(r"^(?:\| `)?contrastile ([a-z]+)([^\n#]*)", text, re.M)
    assert any("--" in line for _, line in lines)
    for command, line in lines:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = capsys.readouterr().out
        for option in re.findall(r"--[a-z-]+", line):
            assert re.search(rf"{option}\b", said), f"{command} has no {option}"


def test_the_front_door_has_the_names_and_arguments_of_the_table() -> None:
    rows = re.findall(r"^\| `contrastile\.(\w+)\(([^)]*)\)` \|", README, re.M)
    assert {name for name, _ in rows} == set(contrastile.__all__) - {"__version__"}
    for name, arguments in rows:
        parameters = inspect.signature(getattr(contrastile, name)).parameters
        given = [argument.strip() for argument in arguments.split(",")]
        positional = [argument for argument in given if not argument.endswith("=")]
        assert list(parameters)[: len(positional)] == positional
        for keyword in set(given) - set(positional):
            assert parameters[keyword.rstrip("=")].kind is inspect.Parameter.KEYWORD_ONLY


def test_the_backends_that_are_here_are_the_ones_that_are_said_to_be() -> None:
    section = README.partition("## What is here")[2].partition("\n## ")[0]
    here, not_yet, later = section.partition("* Not yet: ")
    assert not_yet
    for name in BUILT_IN:
        assert f"`{name}`" in here, f"the README does not say that {name} is here"
        assert name not in later.lower(), f"the README says that {name} is not here"


def test_every_extra_is_one_of_the_project_s() -> None:
    named = re.findall(r"contrastile\[([a-z,]+)\]", README)
    assert named
    assert {extra for names in named for extra in names.split(",")} <= set(PROJECT["optional-dependencies"])


def test_the_changelog_knows_this_version() -> None:
    assert PROJECT["version"] == contrastile.__version__
    assert f"## {contrastile.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
