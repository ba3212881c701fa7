"""Rows and failures for the tests of the reports."""

from __future__ import annotations

from typing import Any

from contrastile.verify.comparison import Worst
from contrastile.verify.runner import Failure, Row


def row(**changes: Any) -> Row:
    base = {"backend": "numpy", "property": "value", "case": "smoke", "dtype": "float32", "device": "cpu", "world": 1}
    found = base | {"ratio": 0.25, "status": "pass", "reason": ""} | changes
    return Row(**({"excess": found["ratio"]} | found))  # type: ignore[typeddict-item]


def untested(**changes: Any) -> Row:
    """A row of a backend that is not there."""
    return row(**({"property": "all", "case": "all", "ratio": None, "status": "skip", "reason": "no cupy"} | changes))


def failure(worst: Worst, command: str = "", **where: Any) -> Failure:
    failed = row(**({"ratio": worst.ratio, "status": "fail", "reason": str(worst)} | where))
    return Failure(failed, worst, "", command or f"contrastile verify --case {failed['case']}")
