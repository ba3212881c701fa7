"""The code and the commands of the documentation run as written, and the site builds."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import make_pages
import pytest
from pages import ROOT, blocks, decimals, masked, printed

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 88
# pages whose blocks need more than a namespace
RUN_ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "docs/how-to/integrations.md": "tests/integrations/recipes.py",
    "docs/how-to/many-gpus.md": "tests/comm/test_communication_pages.py",
    "docs/how-to/switching.md": "tests/test_switching.py",
    "docs/how-to/verify-loss.md": "tests/verify/losses/test_losses_page.py",
    "docs/tutorials/examples.md": "tests/examples/test_examples.py",
    "docs/tutorials/tiny-clip.md": "tests/examples/test_scripts.py",
}
# an existing module for the file that the page shows; a compiler's backend that needs no C++ compiler
REPLACEMENTS = {
    "my_module:backend": "contrastile.backends.numpy:backend",
    "compile(fullgraph=True)": 'compile(fullgraph=True, backend="eager")',
}

# options that shorten a command of a page to seconds
SHORTER_OPTIONS = {
    "--world": "--case smoke --property ring --dtype float32",
    "contrastile verify": "--case smoke --property value --dtype float32",
    "contrastile bench": "--batch 64 --repeat 1 --no-memory",
    "contrastile mutate": "--list",
    "pytest": "-k smoke/value/float32",
}


def links(page: Path) -> list[str]:
    """The relative links of a page."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", page.read_text(encoding="utf-8"))
    return [target for target in targets if "://" not in target]


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text(encoding="utf-8"))], ids=page_name)
def test_the_python_blocks_of_a_page_run_from_top_to_bottom(page: Path) -> None:
    if page_name(page) in RUN_ELSEWHERE:
        assert page.name in (ROOT / RUN_ELSEWHERE[page_name(page)]).read_text(encoding="utf-8")
        return
    scope = {"__name__": "__main__"}
    block_and_output = r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?"
    for source, output in re.findall(block_and_output, page.read_text(encoding="utf-8"), re.M | re.S):
        for shown, replacement in REPLACEMENTS.items():
            source = source.replace(shown, replacement)
        printed_text = printed(source, scope)
        assert not output or masked(printed_text) == masked(output)
        assert not output or decimals(printed_text) == pytest.approx(decimals(output), rel=2e-3)


def commands(page: Path) -> list[tuple[str, str]]:
    """The commands of a page that need no clone and no launcher, each with the output that follows it."""
    blocks_and_outputs = r"^```([^\n]*)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?"
    commands_and_outputs = []
    for language, block, output in re.findall(blocks_and_outputs, page.read_text(encoding="utf-8"), re.M | re.S):
        for line in () if language else block.splitlines():
            command = line.partition("  #")[0].strip()
            if re.match(r"(contrastile|pytest) ", f"{command} "):
                commands_and_outputs.append((command, output))
    return [pair for pair in commands_and_outputs if "peers." not in pair[0]]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=page_name)
def test_the_commands_of_a_page_run_in_order_in_an_empty_folder(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for source, name in re.findall(r'^```python\n((?:"""(\w+\.py)""")?.*?)^```', text, re.M | re.S):
        (tmp_path / (name or "other.py")).write_text(source, encoding="utf-8")
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # as on a reader's machine, where Triton interprets no kernels
    environment = os.environ | {"TRITON_INTERPRET": "0", "PATH": paths}
    for command, output in commands(page):
        shorter = next((options for part, options in SHORTER_OPTIONS.items() if part in command), "")
        words = f"{re.sub('my.module:', 'contrastile.backends.numpy:', command)} {shorter}"
        completed = subprocess.run(words, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert completed.returncode == 0, f"{words}\n{completed.stdout}{completed.stderr}"
        assert not output or masked(completed.stdout) == masked(output)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CONTRIBUTING.md"], ids=page_name)
def test_code_of_a_page_is_read_without_scrolling(page: Path) -> None:
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.splitlines():
            assert len(line) <= WIDTH, line


def test_pages_and_charts_are_what_records_and_code_say() -> None:
    assert make_pages.main(["--check"]) == 0, "run: python scripts/make_pages.py"


@pytest.mark.parametrize("page", [page for page in PAGES if links(page)], ids=page_name)
def test_links_between_pages_lead_to_files(page: Path) -> None:
    for target in links(page):
        assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if "reference" not in page.parts], ids=page_name)
def test_pages_have_no_directive_that_a_code_host_would_show_as_text(page: Path) -> None:
    assert not re.search(r"^(:::|--8<--|!!!|\?\?\?) ", page.read_text(encoding="utf-8"), re.M)


def test_the_smallest_text_of_every_chart_is_legible_on_a_phone() -> None:
    for path in [*(ROOT / "docs" / "assets").glob("home*.svg"), *(ROOT / "docs" / "results").glob("*.svg")]:
        text = path.read_text(encoding="utf-8")
        width = float(re.findall(r'viewBox="0 0 ([\d.]+)', text)[0])
        # in pixels: phones show home-phone and not home; other charts scroll at a width of 31rem
        shown_width = {"home-phone": 358, "home": 705}.get(path.stem, 620)
        assert min(map(float, re.findall(r"font-size: ([\d.]+)px", text))) * shown_width / width >= 9, path


def test_no_equation_of_a_docstring_is_taken_for_html() -> None:
    """A browser takes ``<q_i, k_j>`` outside of code for a tag and does not show it."""
    for file in (ROOT / "contrastile").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = re.sub(r"``.*?``|^    .*?$", "", ast.get_docstring(node) or "", flags=re.S | re.M)
                assert not re.search(r"<[a-zA-Z/]", text), f"{file}: {text}"


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="needs MkDocs: pip install 'contrastile[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    completed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "site" / "index.html").exists()
