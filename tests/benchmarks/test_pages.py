"""A record becomes the tables it should, and a page that says something else is found out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import make_pages
import page_tables as tables
import pytest

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
OURS, OPEN_CLIP = "contrastile triton", "open_clip formula"


def timed(part: str, name: str, b: int, ms: float, n: int = 1, exchange: str = "local", **more: Any) -> dict[str, Any]:
    share = 8.0 * b * b * 512 / n / ms * 1e-9 / 700.0
    row = {"part": part, "name": name, "n": n, "rows": b // n, "b": b, "d": 512, "scale": 100.0, "what": "both"}
    row |= {"graph": False, "each": False, "exchange": exchange, "status": "measured", "milliseconds": [ms]}
    return row | {"ceiling_tflops": [700.0], "fraction": [share]} | more


def record(times: list[dict[str, Any]], ranks: int = 1, **more: Any) -> dict[str, Any]:
    environment = {"device": "Some GPU", "date": "2026-01-02T03:04:05", "commit": "c" * 40, "torch": "2.11.0"}
    verified = [{"name": OURS, "pass": 26, "worst": 0.762, "verdict": "pass"}]
    return {"environment": environment | {"ranks": ranks} | more, "verify": verified, "times": times}


ONE = record(
    [
        timed("steps", OURS, 65536, 30.0, peak_bytes=900 * MIB),
        timed("steps", "contrastile cupy", 65536, 25.0),
        timed("peers", OURS, 65536, 30.0, peak_bytes=900 * MIB),
        timed("peers", OPEN_CLIP, 65536, 90.0, peak_bytes=9000 * MIB),
        timed("peers", "inf_cl x2", 65536, 1.0) | {"status": "skip", "reason": "no module"},
        timed("peers", OURS, 8192, 2.0),
    ]
)
FOUR = record(
    [
        timed("steps", OURS, 32768, 6.0, each=True),
        timed("steps", OURS, 131072, 25.0, 4, "ring", each=True),
        timed("steps", OURS, 131072, 30.0, 4, "gather", each=True, peak_bytes=900 * MIB),
    ],
    4,
)


def test_a_page_that_says_something_else_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "gpu_some.json").write_text(json.dumps(ONE))
    (tmp_path / "README.md").write_text("no part is made\n")
    page = tmp_path / "docs" / "gpu.md"
    page.write_text("before\n<!-- made by scripts/make_pages.py: one GPU -->\nstale\n<!-- end -->\nafter\n")
    how = ["--root", str(tmp_path)]
    assert make_pages.main([*how, "--check"]) == 1
    assert make_pages.main(how) == 0
    assert make_pages.main([*how, "--check"]) == 0
    text = page.read_text()
    assert re.search("^before\n<!-- .* -->\n\n### Some GPU, cccccccccccc\n.*\n\n<!-- end -->\nafter\n", text, re.DOTALL)
    page.write_text(text.replace("83.8 %", "83.9 %"))
    assert make_pages.main([*how, "--check"]) == 1
    page.write_text(text)
    chart = tmp_path / "docs" / "assets" / "home-light.svg"
    chart.write_text(chart.read_text().replace("Some GPU", "Old GPU"))
    assert make_pages.main([*how, "--check"]) == 1
    assert "docs/assets/home-light.svg is stale" in capsys.readouterr().out


def test_steps_and_peers_are_shares_of_the_ceiling() -> None:
    text = tables.gpu_section("gpu_some", ONE)
    assert f"Verified first, 26 checks of {OURS}: the largest error is 0.762 of its bound." in text
    # 8 x 65536^2 x 512 / 30 ms / 700 TFLOP/s
    assert "| 65,536 | 512 | 100 | no | 30.0 ms, 83.8 %, 900.0 MiB | 25.0 ms, 100.5 % |" in text
    assert "| *the limit, 8 b² d / ceiling* | 0.393 | 25.1 | 100 % | 0 |" in text
    assert f"| {OPEN_CLIP} | - | 90.0 | 27.9 % | 9,000 |" in text
    assert "inf_cl" not in text


def test_perfect_scaling_is_the_rate_of_a_rank_alone() -> None:
    rows = tables.scaling(FOUR).splitlines()[2:]
    assert rows[0].endswith("| 100.0 % |")
    # as many pairs on every rank: 4 x 6 / 25
    assert rows[1].endswith("| 96.0 % |")
    assert "900.0 MiB" in rows[1]


def test_no_table_of_a_page_is_longer_than_a_screen() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs" / "benchmarks").glob("*.md")):
        blocks = path.read_text(encoding="utf-8").split("\n\n")
        assert max(block.count("\n|") for block in blocks) <= 26, path
