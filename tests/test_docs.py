"""What the documentation shows runs as written."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import make_pages
import numpy as np
import pytest
from pages import ROOT, blocks, masked, printed

import contrastile

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH, LONGEST = 88, 2500
# pages whose blocks need more than a namespace
RUN_ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "docs/how-to/integrations.md": "tests/integrations/recipes.py",
    "docs/how-to/many-gpus.md": "tests/comm/test_communication_pages.py",
    "docs/how-to/switching.md": "tests/test_switching.py",
    "docs/how-to/verify-loss.md": "tests/verify/losses/test_losses_page.py",
    "docs/tutorials/examples.md": "tests/examples/test_examples.py",
    "docs/tutorials/tiny-clip.md": "tests/test_tutorials.py",
}
# the module that the page shows; a compiler's backend that needs no C++ compiler
STANDING_IN = {"my_module:backend": None, "compile(fullgraph=True)": 'compile(fullgraph=True, backend="eager")'}


@pytest.fixture
def tiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file that docs/how-to/write-backend.md shows, the numpy backend's, as a third-party module."""
    page = (ROOT / "docs" / "how-to" / "write-backend.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r'^--8<-- "(.*)"$', page, re.M)
    name = "tiled_from_the_page"
    (tmp_path / f"{name}.py").write_text((ROOT / shown).read_text(encoding="utf-8"))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return f"{name}:backend"


def test_the_backend_of_the_page_serves_the_front_door(tiled: str) -> None:
    image, text = np.random.default_rng(29).standard_normal((2, 19, 7)).astype("float32")
    loss = contrastile.clip_loss(image, text, 14.0, backend=tiled, tile=(8, 5))
    assert loss.dtype == np.float32
    assert np.isfinite(loss)


def links(page: Path) -> list[str]:
    """The relative links of a page."""
    found = re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", page.read_text(encoding="utf-8"))
    return [target for target in found if "://" not in target]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text(encoding="utf-8"))], ids=named)
def test_the_python_blocks_of_a_page_run_from_top_to_bottom(page: Path, tiled: str) -> None:
    if named(page) in RUN_ELSEWHERE:
        assert page.name in (ROOT / RUN_ELSEWHERE[named(page)]).read_text(encoding="utf-8")
        return
    scope = {"__name__": "__main__"}
    block_and_output = r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?"
    for source, output in re.findall(block_and_output, page.read_text(encoding="utf-8"), re.M | re.S):
        for shown_name, name in STANDING_IN.items():
            source = source.replace(shown_name, name or tiled)
        said = printed(source, scope)
        assert not output or masked(said) == masked(output)


def shown(block: str) -> str:
    """A block, or the file that it includes."""
    found = re.fullmatch(r'--8<-- "(.*)"\n', block)
    return (ROOT / found[1]).read_text(encoding="utf-8") if found else block


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CONTRIBUTING.md"], ids=named)
def test_code_of_a_page_is_read_without_scrolling(page: Path) -> None:
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for line in shown(block).splitlines():
            assert len(line) <= WIDTH, line


@pytest.mark.parametrize("page", [page for page in PAGES if "reference" not in page.parts], ids=named)
def test_a_page_is_read_in_one_sitting(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= LONGEST


def test_pages_and_charts_are_what_records_and_code_say() -> None:
    assert make_pages.main(["--check"]) == 0, "run: python scripts/make_pages.py"


@pytest.mark.parametrize("page", [page for page in PAGES if links(page)], ids=named)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in links(page):
        assert (page.parent / target).exists(), f"{page}: {target}"


def test_no_equation_of_a_docstring_on_a_page_is_taken_for_html() -> None:
    """``<q_i, k_j>`` outside of code is a tag, which a browser does not show."""
    shown = {name for page in PAGES for name in re.findall(r"^::: ([\w.]+)", page.read_text(encoding="utf-8"), re.M)}
    folders = {name: [ROOT.joinpath(*name.split(".")[:n]) for n in range(2, 6)] for name in shown}
    files = {
        file
        for paths in folders.values()
        for path in paths
        for file in (path.with_suffix(".py"), path / "__init__.py")
        if file.exists()
    }
    assert len(files) > 15
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = re.sub(r"``.*?``|^    .*?$", "", ast.get_docstring(node) or "", flags=re.S | re.M)
                assert not re.search(r"<[a-zA-Z/]", text), f"{file}: {text}"


def test_every_page_is_in_the_site_s_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in navigation
