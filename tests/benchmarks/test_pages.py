"""A page or a chart that says something else than its record is found out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import make_pages
import pytest


def record() -> dict[str, Any]:
    row = {"part": "peers", "n": 1, "rows": 65536, "b": 65536, "d": 512, "scale": 100.0, "what": "both", "graph": False}
    row |= {"exchange": "local", "status": "measured", "milliseconds": [30.0], "ceiling_tflops": [700.0]}
    row |= {"fraction": [0.838], "peak_bytes": 900 * 2**20}
    environment = {"device": "Some GPU", "date": "2026-01-02T03:04:05", "commit": "c" * 40, "torch": "2.11.0"}
    times = [row | {"name": name} for name in ("contrastile triton", "open_clip formula")]
    return {"environment": environment, "verify": [], "times": times}


def test_a_page_that_says_something_else_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "gpu_some.json").write_text(json.dumps(record()))
    (tmp_path / "README.md").write_text("no part is made\n")
    page = tmp_path / "docs" / "gpu.md"
    page.write_text("before\n<!-- made by scripts/make_pages.py: one GPU -->\nstale\n<!-- end -->\nafter\n")
    how = ["--root", str(tmp_path)]
    assert make_pages.main([*how, "--check"]) == 1
    assert make_pages.main(how) == 0
    assert make_pages.main([*how, "--check"]) == 0
    text = page.read_text()
    assert re.search("^before\n<!-- .* -->\n\n### Some GPU\n.*\n\n<!-- end -->\nafter\n", text, re.DOTALL)
    page.write_text(text.replace("83.8 %", "83.9 %"))
    assert make_pages.main([*how, "--check"]) == 1
    page.write_text(text)
    chart = tmp_path / "docs" / "assets" / "home.svg"
    chart.write_text(chart.read_text().replace("Some GPU", "Old GPU"))
    assert make_pages.main([*how, "--check"]) == 1
    assert "docs/assets/home.svg is stale" in capsys.readouterr().out
