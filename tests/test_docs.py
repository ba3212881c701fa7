"""What the documentation shows runs as written."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import contrastile
from contrastile.backends import load
from contrastile.schedules.problem import Problem
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import compare
from contrastile.verify.execution import outcome
from contrastile.verify.truth import masks, truth

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH, LONGEST = 88, 2500
# pages whose blocks need more than a namespace
RUN_ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "docs/how-to/integrations.md": "tests/integrations/recipes.py",
    "docs/how-to/many-gpus.md": "tests/comm/test_many_gpus_page.py",
    "docs/how-to/switching.md": "tests/test_switching.py",
    "docs/how-to/verify-loss.md": "tests/verify/losses/test_losses_page.py",
    "docs/tutorials/examples.md": "tests/examples/test_examples.py",
    "docs/tutorials/tiny-clip.md": "tests/test_tutorials.py",
}
# the module that the page shows; a compiler's backend that needs no C++ compiler
STANDING_IN = {"my_module:backend": None, "compile(fullgraph=True)": 'compile(fullgraph=True, backend="eager")'}
M, N, D = 19, 23, 7
rng = np.random.default_rng(29)


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture
def tiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file that docs/how-to/write-backend.md shows, as a third-party module."""
    page = (ROOT / "docs" / "how-to" / "write-backend.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r'^--8<-- "(.*)"$', page, re.M)
    name = "tiled_from_the_page"
    (tmp_path / f"{name}.py").write_text((ROOT / shown).read_text(encoding="utf-8"))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return f"{name}:backend"


def problems(kind: str, dtype: str) -> list[Problem]:
    """Ragged, signed weights, with ids dropped and as labels, with some columns excluded."""
    ids = rng.integers(0, 6, size=M), rng.integers(0, 6, size=N)
    common = {
        "rows": rng.standard_normal((M, D)).astype(dtype).astype("float64"),
        "columns": tuple(rng.standard_normal((n, D)).astype(dtype).astype("float64") for n in (N - 4, 4)),
        "scale": np.float64(7.0),
        "row_weight": np.round(rng.standard_normal(M) * 8) / 64,
        "row_target": np.ones(M),
        "kind": kind,
        "row_ids": ids[0],
        "column_ids": ids[1],
    }
    if kind == "sigmoid":
        common["bias"] = np.float64(-2.0)
    else:
        common |= {"column_weight": np.round(rng.standard_normal(N) * 8) / 64, "column_target": np.ones(N)}
    return [
        shared(Problem(**common, positives=rng.integers(0, N, size=M))),
        shared(Problem(**common, match="target", excluded=rng.integers(0, N, size=M))),
    ]


def shared(problem: Problem) -> Problem:
    """The targets of a row, and of a column, shared among its positives."""
    _, positive = masks(problem)
    rows, columns = (positive.sum(axis) for axis in (1, 0))
    targets = {"row_target": (rows > 0) / rows.clip(1), "column_target": (columns > 0) / columns.clip(1)}
    return replace(problem, **targets) if problem.kind == "softmax" else problem


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_backend_of_the_page_is_within_its_bounds(tiled: str, kind: str, dtype: str) -> None:
    backend = load(tiled)
    for problem in problems(kind, dtype):
        exact = truth(problem)
        found = outcome(problem, backend, dtype)
        worst = compare(found, exact.outcome, bounds(problem, exact, backend.accuracy(dtype, "cpu"), dtype))
        assert worst.ratio < 1, worst


def test_the_backend_of_the_page_serves_the_front_door(tiled: str) -> None:
    image, text = rng.standard_normal((2, M, D)).astype("float32")
    loss = contrastile.clip_loss(image, text, 14.0, backend=tiled, tile=(8, 5))
    assert loss.dtype == np.float32
    assert np.isfinite(loss)


def links(page: Path) -> list[str]:
    """The relative links of a page."""
    found = re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", page.read_text(encoding="utf-8"))
    return [target for target in found if "://" not in target]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page, "python")], ids=named)
def test_the_python_blocks_of_a_page_run_from_top_to_bottom(page: Path, tiled: str) -> None:
    if named(page) in RUN_ELSEWHERE:
        assert page.name in (ROOT / RUN_ELSEWHERE[named(page)]).read_text(encoding="utf-8")
        return
    scope = {"__name__": "__main__"}
    block_and_output = r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?"
    for source, output in re.findall(block_and_output, page.read_text(encoding="utf-8"), re.M | re.S):
        for shown_name, name in STANDING_IN.items():
            source = source.replace(shown_name, name or tiled)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(source, str(page), "exec"), scope)
        # the last digits differ between machines
        assert not output or re.sub(r"\d+\.\d+", "#", said.getvalue()) == re.sub(r"\d+\.\d+", "#", output)


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


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "scripts").glob("make_*_page.py")))
def test_a_page_that_a_script_writes_is_what_it_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    made = importlib.import_module(name)
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), f"run: python scripts/{name}.py"
    if hasattr(made, "FIGURE"):
        assert made.FIGURE.read_text(encoding="utf-8") == made.figure(), f"run: python scripts/{name}.py"


@pytest.mark.parametrize("page", [page for page in PAGES if links(page)], ids=named)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in links(page):
        assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_page_is_in_the_site_s_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in navigation
