"""The README is true: its example runs as written, and every name in it exists."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pages import ROOT, blocks, printed, read

import contrastile
from contrastile.cli import COMMANDS

README, MAKEFILE = read("README.md"), read("Makefile")
PROJECT = tomllib.loads(read("pyproject.toml"))["project"]


def test_the_example_runs_as_written_and_is_short() -> None:
    (example,) = blocks(README)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    assert re.fullmatch(r"loss \d+\.\d+, gradient of \(1000, 64\)\n", printed(example))
    assert blocks(read("docs/index.md")) == [example]


def test_every_target_of_make_exists() -> None:
    pages = [README, *(path.read_text(encoding="utf-8") for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])]
    named = {
        name for page in pages for name in re.findall(r"^make ([a-z]+)|`make ([a-z]+)`", page, re.M) for name in name
    }
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.M))
    assert {"verify", "test"} <= named - {""} <= targets


def test_the_page_of_commands_has_every_command() -> None:
    page = read("docs/reference/command-line.md")
    named = set(re.findall(r"^## ([a-z]+)$", page, re.M))
    assert named == set(COMMANDS)
    for module, _ in COMMANDS.values():
        assert importlib.util.find_spec(module) is not None, module


def test_the_package_has_the_names_and_arguments_of_the_table_of_losses() -> None:
    page = read("docs/reference/losses.md")
    rows = re.findall(r"^\| `contrastile\.(\w+)\(([^)]*)\)` \|", page, re.M)
    assert {name for name, _ in rows} == set(contrastile.__all__) - {"__version__"}
    for name, signature in rows:
        parameters = inspect.signature(getattr(contrastile, name)).parameters
        names = [argument.strip() for argument in signature.split(",")]
        positional = [argument for argument in names if not argument.endswith("=")]
        assert list(parameters)[: len(positional)] == positional
        for keyword in set(names) - set(positional):
            assert parameters[keyword.rstrip("=")].kind is inspect.Parameter.KEYWORD_ONLY
    with pytest.raises(AttributeError, match="no attribute 'clip'"):
        contrastile.clip  # noqa: B018


def test_the_documented_extras_are_those_of_the_project() -> None:
    page = read("docs/tutorials/install.md")
    named = re.findall(r"contrastile\[([a-z,]+)\]", README + page)
    extras = {extra for names in named for extra in names.split(",")}
    assert set(PROJECT["optional-dependencies"]) - {"docs", "test", "test-slow"} <= extras
    assert extras <= set(PROJECT["optional-dependencies"])


def test_the_changelog_knows_this_version() -> None:
    assert PROJECT["version"] == contrastile.__version__
    assert f"## {contrastile.__version__}" in read("CHANGELOG.md")


def test_with_an_address_in_pyproject_the_package_s_readme_has_no_relative_link(tmp_path: Path) -> None:
    settings = read("pyproject.toml")
    with_address = re.sub(r"^# (\[project\.urls\]|Source = .*)$", r"\1", settings, flags=re.M)
    assert "urls" in tomllib.loads(with_address)["project"]
    links = {}
    for name, text in (("without", settings), ("with", with_address)):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("README.md", "setup.py", "LICENSE"):
            shutil.copy(ROOT / file, folder)
        (folder / "pyproject.toml").write_text(text, encoding="utf-8")
        subprocess.run([sys.executable, "setup.py", "--quiet", "egg_info"], cwd=folder, check=True, capture_output=True)
        metadata = (folder / "contrastile.egg-info" / "PKG-INFO").read_text(encoding="utf-8")
        links[name] = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", metadata)
    assert len(links["without"]) == len(links["with"]) > 5
    assert all(any(target.startswith("https://") for target in targets) for targets in links["with"])
    assert not any(target.startswith("https://") for targets in links["without"] for target in targets)
