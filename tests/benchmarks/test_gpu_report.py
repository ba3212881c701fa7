"""The committed page says what the records say, and a record becomes the tables it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_report
import pytest
import readme_report
from gpu_run import tables
from gpu_run.plan import CUPY, INF_CL, KEEPING, OPEN_CLIP, TRITON, Point

MIB = 2**20


def timed(group: str, name: str, point: Point, ms: float, **more: Any) -> dict[str, Any]:
    top = 700.0
    share = point.flops / ms * 1e-9 / top
    row = {"group": group, "implementation": name, **point.row(), "dtype": "bfloat16", "status": "measured"}
    samples = {"milliseconds": [ms], "calls": 1, "ceiling_tflops": [top], "fraction": [share], "first_seconds": 1.0}
    return row | samples | {"readings": {"clocks.sm": [1000, 1500, 1800], "power.draw": [1, 690, 700]}} | more


def error(name: str, b: int, scale: float, value: float | None) -> dict[str, Any]:
    fields = dict.fromkeys(("loss", "d_image", "d_text", "d_scale"), value)
    return {"implementation": name, "b": b, "d": 512, "scale": scale, "samples": 9, "status": "measured", **fields}


@pytest.fixture
def record() -> dict[str, Any]:
    """A made-up run in which every table has a row."""
    point, safe = Point(65536, 512), Point(65536, 512, 400.0)
    blocks = [[512 * MIB, 1], [128 * MIB, 2], [64 * MIB, 1], [4 * 65536, 3]]
    return {
        "environment": {"device": "Some GPU", "date": "2026-01-02T03:04:05", "commit": "c" * 40, "torch": "2.11.0"},
        "settings": {"slot": 0.5, "smoke": False},
        "verify": [],
        "times": [
            timed("aims", TRITON, point, 30.0, aim=0.82, peak_bytes=900 * MIB, peak_blocks=blocks),
            timed("aims", TRITON, safe, 60.0, aim=0.68),
            timed("peers", TRITON, point, 30.0, peak_bytes=900 * MIB),
            timed("peers", OPEN_CLIP, point, 90.0, peak_bytes=9000 * MIB),
            timed("peers", INF_CL, point, 1200.0, peak_bytes=1000 * MIB),
            timed("grid", TRITON, Point(8192, 512, what="forward"), 0.1),
            timed("peers", "quack-kernels x2", point, 1.0) | {"status": "skip", "reason": "no module"},
        ],
        "errors": [
            error(TRITON, 65536, 14.3, 0.001),
            error(OPEN_CLIP, 65536, 14.3, 0.0004),
            error(INF_CL, 9, 1.0, None),
        ],
        "checks": [{"implementation": TRITON, "check": "20 repeats", "holds": False, "found": "19 of 20"}],
        "big": [{"implementation": TRITON, "b": 4194304, "status": "skip", "reason": "the run's time was up"}],
    }


def test_the_committed_page_is_what_the_records_say() -> None:
    assert gpu_report.main(["--check"]) == 0
    assert readme_report.PAGE.main(["--check"]) == 0


def test_a_page_that_says_something_else_is_found_out(tmp_path: Path, record: dict[str, Any]) -> None:
    (tmp_path / "gpu_some.json").write_text(json.dumps(record), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu_report.BEGIN}\nstale\n{gpu_report.END}\nafter\n", encoding="utf-8")
    how = ["--results", str(tmp_path), "--page", str(page)]
    assert gpu_report.main([*how, "--check"]) == 1
    assert gpu_report.main(how) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "stale" not in text
    assert gpu_report.main([*how, "--check"]) == 0
    page.write_text(text.replace("30.0", "29.0"), encoding="utf-8")
    assert gpu_report.main([*how, "--check"]) == 1


def test_the_readme_shows_whom_a_record_compares(tmp_path: Path, record: dict[str, Any]) -> None:
    (tmp_path / "gpu_alone.json").write_text(json.dumps(record | {"times": []}), encoding="utf-8")
    assert readme_report.PAGE.generated(tmp_path) == readme_report.PAGE.nothing
    for stem in ("gpu_some_gpu", "gpu_some_gpu_further"):
        (tmp_path / f"{stem}.json").write_text(json.dumps(record), encoding="utf-8")
    text = readme_report.PAGE.generated(tmp_path)
    assert text.count("One ") == 1
    assert OPEN_CLIP in text
    assert "of the ceiling" not in text


def test_the_readme_shows_what_memory_to_spare_buys(tmp_path: Path, record: dict[str, Any]) -> None:
    point, safe = Point(65536, 512), Point(65536, 512, 400.0)
    more = [
        timed("aims", CUPY, point, 25.0, peak_bytes=771 * MIB),
        timed("aims", CUPY, safe, 28.0),
        timed("aims", KEEPING, point, 20.0, peak_bytes=2820 * MIB),
    ]
    path = tmp_path / "gpu_some_gpu_further.json"
    path.write_text(json.dumps(record | {"times": more}), encoding="utf-8")
    text = readme_report.PAGE.generated(tmp_path)
    (row,) = [line for line in text.splitlines() if line.startswith("| 65,536")]
    assert row == "| 65,536 | 512 | 25.0 ms, 100.5 %, 771.0 MiB | 20.0 ms, 125.7 %, 2,820 MiB | - |"


def test_the_figure_is_drawn_alike_each_time(tmp_path: Path, record: dict[str, Any]) -> None:
    paths = [tmp_path / f"{name}.svg" for name in "ab"]
    for path in paths:
        gpu_report.figures.draw(record, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_without_records_the_page_says_that_nothing_was_measured(tmp_path: Path) -> None:
    assert gpu_report.generated(tmp_path) == gpu_report.NOTHING


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold"):
        gpu_report.spliced("text", "more")


def test_the_tables_say_what_was_reached(record: dict[str, Any]) -> None:
    first, second = tables.aims(record).splitlines()[2:]
    # 8 b^2 d / 30 ms = 586 TFLOP/s of 700
    assert "| 586 | 700 | 83.8 % | 82 % | yes |" in first
    assert "| safe |" in second
    assert "| 68 % | **no** |" in second
    assert f"is open_clip formula: it takes 3.00 times as long as {TRITON}" in tables.comparison(record)
    assert "`inf_cl` takes 40.0 times" in tables.comparison(record)
    assert "quack-kernels x2, b = 65,536: no module" in tables.skipped(record)
    assert f"{TRITON}, b = 4,194,304: the run's time was up" in tables.skipped(record)
    assert "| *the limit, 8 b² d / ceiling* | 25.1 | 100 % | 0 |" in tables.peers(record)


def test_the_memory_table_adds_up(record: dict[str, Any]) -> None:
    text = tables.memory(record)
    assert "| workspace | 1 | 512.0 |" in text
    assert "| sums of b d in float32 | 2 | 256.0 |" in text
    assert "| gradients of b d in bfloat16 | 1 | 64.00 |" in text
    assert "| vectors of b, partial results and all else | 3 | 0.7500 |" in text
    assert "workspace |  | 260.0 |" in text


def test_checks_that_fail_stand_out(record: dict[str, Any]) -> None:
    text = tables.checks(record)
    assert f"| {TRITON}: 20 repeats | **no** | 19 of 20 |" in text
    assert f"at most twice that of the {OPEN_CLIP} | **no** | 2.50 |" in text
    assert "at most 0.002 | yes | 0.00100 |" in text
    assert "| inf_cl x2 | 9 | 1 | not finite |" in tables.errors(record)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0989, "0.0989"), (1234.5, "1,234"), (65536, "65,536"), (12.34, "12.3"), (2e-5, "2.00e-05")],
)
def test_numbers_keep_their_digits(value: float, text: str) -> None:
    assert tables.number(value) == text
