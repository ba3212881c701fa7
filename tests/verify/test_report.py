"""The report: verdict, JSON, table, skips."""

import json

import pytest

from contrastile.reporting import write_json
from contrastile.verify.report import as_json, cell, show, skips, summary, verdict
from contrastile.verify.run import Worst
from contrastile.verify.runner import Failure, Row


def row(**changes):
    base = {"backend": "numpy", "property": "value", "case": "smoke", "dtype": "float32", "world": 1}
    return Row(**(base | {"ratio": 0.25, "status": "pass", "reason": ""} | changes))


PASSED = row()
FAILED = row(case="ragged", ratio=12.0, status="fail", reason="loss: error 12, bound 1")
HOPELESS = row(case="hot", ratio=float("inf"), status="fail", reason="raised IndexError")
SKIPPED = row(case="nan", ratio=None, status="skip", reason="needs a finite loss")


def test_one_failure_is_a_verdict_and_skips_are_not():
    assert verdict([PASSED, SKIPPED]) == "pass"
    assert verdict([PASSED, FAILED]) == "fail"


def test_json_is_strict_and_has_the_schema(tmp_path):
    path = tmp_path / "report.json"
    write_json(path, as_json([PASSED, FAILED, HOPELESS, SKIPPED]))

    def refuse(constant):
        raise AssertionError(constant)

    read = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert list(read) == ["verdict", "environment", "rows"]
    assert read["verdict"] == "fail"
    assert [each["ratio"] for each in read["rows"]] == [0.25, 12.0, None, None]
    assert [each["status"] for each in read["rows"]] == ["pass", "fail", "fail", "skip"]
    fields = ["backend", "property", "case", "dtype", "world", "ratio", "status", "reason"]
    assert all(list(each) == fields for each in read["rows"])
    assert as_json([PASSED])["rows"] == [PASSED]


def test_a_cell_has_the_worst_ratio_and_the_counts():
    assert cell([PASSED, FAILED, SKIPPED]) == "12 (1 failed, 1 passed, 1 skipped)"
    assert cell([SKIPPED]) == "- (1 skipped)"
    assert cell([row(ratio=0.99999)]) == "0.999 (1 passed)"
    assert cell([row(ratio=0.00012345)]) == "0.000123 (1 passed)"


def test_skips_are_grouped_by_reason():
    other = {**SKIPPED, "property": "tiles", "dtype": "float64"}
    assert skips([PASSED, SKIPPED, Row(**other)]) == [
        "numpy: value, tiles (2; float32, float64): needs a finite loss",
    ]


def test_summary_counts():
    assert summary([PASSED, SKIPPED]) == "PASS: 1 passed, 0 failed, 1 skipped; largest error 0.25 of its bound"


@pytest.mark.parametrize("quiet", [True, False])
def test_a_failure_shows_element_bound_and_command(capsys, quiet):
    failure = Failure(FAILED, Worst(12.0, "loss", (), 12.0, 1.0), "", "contrastile verify --case ragged")
    absent = row(backend="cupy", property="all", case="all", dtype="all", ratio=None, status="skip", reason="no cupy")
    show([PASSED, FAILED, SKIPPED, absent], [failure], quiet=quiet)
    out = capsys.readouterr().out
    for text in ("loss: error 12, bound 1", "error / bound = 12", "rerun: contrastile verify --case ragged", "FAIL: 1"):
        assert text in out
    assert ("property" in out) is not quiet
    assert ("no cupy" in out) is not quiet
