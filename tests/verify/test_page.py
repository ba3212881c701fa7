"""The report of ``contrastile verify --report``: what it holds, that it escapes and loads nothing, and how it looks."""

from __future__ import annotations

import html
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rows import failure, row, untested

from contrastile.cli import main
from contrastile.verify import plots
from contrastile.verify.comparison import Point, Worst
from contrastile.verify.growth import AXES
from contrastile.verify.page import page
from contrastile.verify.runner import Failure, Row

HOSTILE = "<script>alert('x')</script>&\""


def failed(**changes: Any) -> Failure:
    command = f"contrastile verify --backend '{HOSTILE}'"
    return failure(Worst(12.0, "loss", (), 12.0, 1.0), command, reason=f"raised {HOSTILE}", **changes)


def points(**changes: float) -> list[Point]:
    lines = {"error": 1e-7, "plain": 2e-7, "probable": 1e-6, "bound": 1e-5} | changes
    return [Point(axis=axis, x=x, **lines) for axis, values in AXES.items() for x in values]  # type: ignore[typeddict-item]


def report(*more: Row, failures: tuple[Failure, ...] = ()) -> str:
    rows = [row(), row(property="growth", case="growth", points=points()), row(property="tiles", ratio=1e-9), *more]
    return page(rows, failures, ["contrastile", "verify", "--case", HOSTILE], 71.8, ["3 cases (--quick)"])


def test_it_holds_the_verdict_what_was_not_tested_the_cells_and_the_command() -> None:
    absent = untested(backend="cupy")
    silent = untested(backend="mine:clip", case="ids", status="unclaimed", reason="equal ids")
    text = report(absent, silent)
    for said in (
        "PASS",
        "in 72 s",
        "3 cases (--quick)",
        "cupy (no cupy)",
        "mine:clip: equal ids",
        "numpy on cpu: 3 passed, 0 failed",
        "&quot;python&quot;",
        f"{datetime.now(UTC):%Y-%m-%d}",
        "seed 0",
    ):
        assert said in text
    assert text.count("<svg") == 1
    cells = dict(re.findall(r'<td style="--h:([\d.]+)">([^<]*)</td>', text))
    # log scale: nothing at 1e-4 and below, all of 0.75 at 1
    assert cells["0.00"] == "1e-09"
    assert cells["0.64"] == "0.25"


def test_a_failure_is_in_its_cell_and_in_the_list() -> None:
    found = failed(case="hot")
    text = report(found.row, failures=(found,))
    assert '<td class="failed">12</td>' in text
    assert "FAILED numpy value hot float32" in text
    assert '<h1 class="fail">' in text


def test_whatever_others_wrote_is_escaped_and_nothing_is_loaded() -> None:
    found = failed(backend=HOSTILE, case=HOSTILE, dtype=HOSTILE)
    absent = untested(backend=f"{HOSTILE}2", reason=HOSTILE)
    text = report(found.row, absent, failures=(found,))
    assert HOSTILE not in text
    assert "<script" not in text
    assert html.escape(HOSTILE) in text
    # a namespace is a name, and no address
    assert "://" not in re.sub(r'xmlns(:\w+)?="http://www.w3.org/[\w/]+"', "", text)


@pytest.mark.parametrize("changes", [{}, {"error": 0.0}, {"bound": float("inf")}, {"plain": float("nan")}])
def test_a_figure_is_xml_that_names_and_draws_every_line(changes: dict[str, float]) -> None:
    text = plots.figure([("float32", points(**changes)), ("float16", points())], list(AXES))
    said = "".join(ElementTree.fromstring(text).itertext())
    assert all(about in said for about, _ in plots.LINES.values())
    drawn = re.findall(r"stroke: var\(--c(\w+)", text)
    # two lines of one colour; in every plot, and in the legend
    assert min(drawn.count(look["color"][1:]) for _, look in plots.LINES.values()) > len(AXES)


def test_the_command_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    words = ["verify", "--backend", "numpy", "--case", "one-row", "--property", "value", "--dtype", "float64"]
    assert main([*words, "--quiet", "--report", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert "contrastile verify --backend numpy --case one-row" in text
    assert "the property growth did not run" in text
