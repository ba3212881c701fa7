"""The report: verdict, JSON, table, skips and causes. Its HTML page: contents, escaping, and no external address."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from contrastile.cli import main
from contrastile.reporting import write_json
from contrastile.verify import plots
from contrastile.verify.comparison import Point, Worst
from contrastile.verify.growth import AXES
from contrastile.verify.page import page
from contrastile.verify.report import as_json, causes, show, skips, summary, table, worst
from contrastile.verify.runner import Failure, Row


def row(**changes: Any) -> Row:
    base = {"backend": "numpy", "property": "value", "case": "smoke", "dtype": "float32", "device": "cpu", "world": 1}
    values = base | {"ratio": 0.25, "status": "pass", "reason": ""} | changes
    return Row(**({"excess": values["ratio"]} | values))  # type: ignore[typeddict-item]


def untested(**changes: Any) -> Row:
    """A row of a missing backend."""
    return row(**({"property": "all", "case": "all", "ratio": None, "status": "skip", "reason": "no cupy"} | changes))


def failure(worst: Worst, command: str = "", **changes: Any) -> Failure:
    failed_row = row(**({"ratio": worst.ratio, "status": "fail", "reason": str(worst)} | changes))
    return Failure(failed_row, worst, "", command or f"contrastile verify --case {failed_row['case']}")


PASSED = row()
FAILED = row(case="ragged", ratio=12.0, status="fail", reason="loss: error 12, bound 1")
HOPELESS = row(case="hot", ratio=float("inf"), status="fail", reason="raised IndexError")
SKIPPED = row(case="nan", ratio=None, status="skip", reason="needs a finite loss")


def test_json_is_strict_and_has_the_schema(tmp_path):
    path = tmp_path / "report.json"
    write_json(path, as_json([PASSED, FAILED, HOPELESS, SKIPPED]))

    def refuse(constant):
        raise AssertionError(constant)

    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert list(document) == ["verdict", "loose", "environment", "rows"]
    assert document["verdict"] == "fail"
    assert [x["ratio"] for x in document["rows"]] == [0.25, 12.0, None, None]
    assert [x["excess"] for x in document["rows"]] == [0.25, 12.0, None, None]
    assert [x["status"] for x in document["rows"]] == ["pass", "fail", "fail", "skip"]
    fields = {"backend", "property", "case", "dtype", "device", "world", "ratio", "excess", "status", "reason"}
    assert all(set(x) == fields for x in document["rows"])
    document = as_json([PASSED, SKIPPED])
    environment = document["environment"]
    assert document == {"verdict": "pass", "loose": False, "environment": environment, "rows": [PASSED, SKIPPED]}


def test_the_table_has_a_line_for_each_backend_and_dtype():
    memory = row(property="peak-memory", case="peak-memory", ratio=0.9)
    other = row(property="tiles", ratio=0.0123)
    rows = [PASSED, FAILED, SKIPPED, memory, other, row(property="shift"), row(dtype="float16", device="cuda")]
    columns, cells = table(rows)
    assert columns == ["backend", "dtype", "value", "memory", "others", "passed", "failed"]
    assert cells == [
        ["numpy", "float32", "FAIL", "0.9", "0.25 shift", "4", "1"],
        ["numpy on cuda", "float16", "0.25", "-", "-", "1", "0"],
    ]
    assert "failed" not in table([PASSED])[0]


def test_a_ratio_is_rounded_down_and_leaves_out_the_rounding_of_the_result():
    assert worst([row(ratio=0.99999)]) == "0.999"
    assert worst([row(ratio=0.00012345)]) == "0.00012"
    assert worst([row(ratio=0.9999, excess=0.2), row(ratio=0.5, excess=0.3)]) == "0.3"
    assert worst([SKIPPED]) == "-"


def test_noise_within_every_bound_is_loose_and_not_wrong():
    noisy = row(property="plain", ratio=1.2, status="fail")
    documents = [as_json(rows, seed=7) for rows in ([PASSED, noisy], [noisy, FAILED], [PASSED])]
    assert [x["loose"] for x in documents] == [True, False, False]
    assert "1 failed, 0 skipped (loose, not wrong: within every bound" in summary([PASSED, noisy])
    assert documents[0]["seed"] == 7


def test_skips_are_grouped_by_reason():
    other = {**SKIPPED, "property": "tiles", "dtype": "float64"}
    narrow = [untested(dtype=d, reason="not it") for d in ("a", "b")]
    assert skips([PASSED, SKIPPED, Row(**other), *narrow]) == [
        "2 of value, tiles: needs a finite loss",
        "numpy a, numpy b: not it",
    ]


def test_the_summary_counts_and_names_what_was_not_tested():
    assert summary([PASSED, SKIPPED]) == "PASS: 1 passed, 0 failed, 1 skipped; largest error 0.25 of its bound"
    memory = row(property="peak-memory", ratio=0.9)
    reason = "backend 'cupy' is not available: no cupy; run: pip install it"
    absent, nowhere = untested(backend="cupy", reason=reason), untested(backend="triton", reason="runs on cuda only")
    assert summary([PASSED, memory, absent, nowhere], 71.8, ["3 cases (--quick)"]) == (
        "PASS: 2 passed, 0 failed, 0 skipped in 72 s; largest error 0.25 of its bound; "
        "not tested: 3 cases (--quick), cupy (no cupy; run: pip install it), triton (runs on cuda only)"
    )


def test_failures_of_one_cause_are_together():
    wrong = Worst(12.0, "columns[1]", (3,), 12.0, 1.0)
    failures = [
        failure(wrong, case="hot"),
        # a later failure in the same case is a consequence
        failure(Worst(2.0, "loss", (), 2.0, 1.0), case="hot", property="tiles"),
        failure(replace(wrong, field="columns[0]", ratio=99.0), case="ragged"),
        failure(Worst(2.0, "loss", (), 2.0, 1.0), case="wide"),
        failure(wrong, case="hot", backend="torch"),
    ]
    assert [[failures.index(x) for x in group] for group in causes(failures)] == [[0, 1, 2], [3], [4]]


def test_a_cause_is_shown_once_with_how_many_follow(capsys):
    failures = [failure(Worst(12.0, "loss", (), 12.0, 1.0), case=name) for name in ("a", "b", "c", "d", "e")]
    show([x.row for x in failures], failures, quiet=True)
    out = capsys.readouterr().out
    assert out.count("FAILED") == 1
    assert "and 4 more, likely of the same cause: value; 4 cases; float32" in out


@pytest.mark.parametrize("quiet", [True, False])
def test_a_failure_shows_element_bound_and_command(capsys, quiet):
    failures = [failure(Worst(12.0, "loss", (), 12.0, 1.0), case="ragged")]
    absent = untested(backend="cupy", dtype="all")
    show([PASSED, FAILED, SKIPPED, absent], failures, quiet=quiet)
    out = capsys.readouterr().out
    for text in ("loss: error 12, bound 1", "error / bound = 12", "rerun: contrastile verify --case ragged", "FAIL: 1"):
        assert text in out
    assert ("others" in out) is not quiet
    assert "not tested: cupy (no cupy)" in out


HOSTILE = "<script>alert('x')</script>&\""


def failed(**changes: Any) -> Failure:
    command = f"contrastile verify --backend '{HOSTILE}'"
    return failure(Worst(12.0, "loss", (), 12.0, 1.0), command, reason=f"raised {HOSTILE}", **changes)


def points(**changes: float) -> list[Point]:
    lines = {"error": 1e-7, "plain": 2e-7, "probable": 1e-6, "bound": 1e-5} | changes
    return [Point(axis=axis, x=x, **lines) for axis, values in AXES.items() for x in values]  # type: ignore[typeddict-item]


def report(*others: Row, failures: tuple[Failure, ...] = ()) -> str:
    rows = [row(), row(property="growth", case="growth", points=points()), row(property="tiles", ratio=1e-9), *others]
    return page(rows, failures, ["contrastile", "verify", "--case", HOSTILE], 71.8, ["3 cases (--quick)"])


def test_the_page_has_the_verdict_the_untested_the_cells_and_the_command() -> None:
    absent = untested(backend="cupy")
    unclaimed = untested(backend="mine:clip", case="ids", status="unclaimed", reason="equal ids")
    text = report(absent, unclaimed)
    for part in (
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
        assert part in text
    assert text.count("<svg") == 1
    cells = dict(re.findall(r'<td style="--h:([\d.]+)">([^<]*)</td>', text))
    # the scale is logarithmic: 0 at 1e-4 and below, 0.75 at 1
    assert cells["0.00"] == "1e-09"
    assert cells["0.64"] == "0.25"


def test_a_failure_is_in_its_cell_and_in_the_list() -> None:
    hot = failed(case="hot")
    text = report(hot.row, failures=(hot,))
    assert '<td class="failed">12</td>' in text
    assert "FAILED numpy value hot float32" in text
    assert '<h1 class="fail">' in text


def test_the_page_escapes_all_text_and_loads_nothing() -> None:
    hostile = failed(backend=HOSTILE, case=HOSTILE, dtype=HOSTILE)
    absent = untested(backend=f"{HOSTILE}2", reason=HOSTILE)
    text = report(hostile.row, absent, failures=(hostile,))
    assert HOSTILE not in text
    assert "<script" not in text
    assert html.escape(HOSTILE) in text
    # the namespaces are names, and no addresses to load
    assert "://" not in re.sub(r'xmlns(:\w+)?="http://www.w3.org/[\w/]+"', "", text)


@pytest.mark.parametrize("changes", [{}, {"error": 0.0}, {"bound": float("inf")}, {"plain": float("nan")}])
def test_a_figure_is_xml_that_names_and_draws_every_line(changes: dict[str, float]) -> None:
    text = plots.figure([("float32", points(**changes)), ("float16", points())], list(AXES))
    words = "".join(ElementTree.fromstring(text).itertext())
    assert all(about in words for about, _ in plots.LINES.values())
    drawn = re.findall(r"stroke: var\(--c(\w+)", text)
    # some lines share a colour; each is in every plot and in the legend
    assert min(drawn.count(look["color"][1:]) for _, look in plots.LINES.values()) > len(AXES)


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    words = ["verify", "--backend", "numpy", "--case", "one-row", "--property", "value", "--dtype", "float64"]
    assert main([*words, "--quiet", "--report", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert "contrastile verify --backend numpy --case one-row" in text
    assert "the property growth did not run" in text
