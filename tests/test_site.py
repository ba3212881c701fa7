"""The site builds without a warning: its links and anchors lead somewhere. The captures of commands that it shows."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import make_captures
import pytest

ROOT = Path(__file__).parent.parent


def test_a_capture_that_names_this_machine_is_refused() -> None:
    make_captures.refuse("torch 2.13.0, /absolute/path")
    with pytest.raises(ValueError, match="must not name this machine"):
        make_captures.refuse(f"found in {sys.prefix}/lib")


def test_the_committed_captures_are_of_today_s_commands_and_name_no_machine() -> None:
    found = {path.stem.removeprefix("terminal-"): path for path in make_captures.ASSETS.glob("terminal-*.svg")}
    assert {"verify", "doctor", "plan"} <= set(found) <= set(make_captures.CAPTURES)
    for name, path in found.items():
        root = ElementTree.parse(path).getroot()
        text = " ".join(element.text or "" for element in root.findall(".//{*}text")).replace("\xa0", " ")
        assert set(make_captures.CAPTURES[name].split()) <= set(text.split())
        assert not re.search(r"/(home|root|tmp|Users|opt|usr)\b", text)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="needs MkDocs: pip install 'contrastile[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "site" / "index.html").exists()
