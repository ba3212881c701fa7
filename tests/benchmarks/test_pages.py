"""The committed pages say what the records say, and a record becomes the tables it should."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pages
import pytest
from harness import figures, tables
from harness.plan import Point

MIB = 2**20
OURS, OPEN_CLIP, INF_CL = "contrastile triton", "open_clip formula", "inf_cl x2"


def timed(part: str, name: str, point: Point, ms: float, n: int = 1, exchange: str = "local", **more: Any) -> Any:
    share = point.flops(n) / ms * 1e-9 / 700.0
    row = {"part": part, "name": name, "exchange": exchange, **point.row(n), "status": "measured"}
    return row | {"milliseconds": [ms], "ceiling_tflops": [700.0], "fraction": [share]} | more


def made_up(times: list[dict[str, Any]], ranks: int = 1, **more: Any) -> dict[str, Any]:
    environment = {"device": "Some GPU", "date": "2026-01-02T03:04:05", "commit": "c" * 40, "torch": "2.11.0"}
    parts = {"verify": [], "times": times, "big": []}
    return {"environment": environment | {"ranks": ranks}, "settings": {"slot": 0.5, "smoke": False}} | parts | more


@pytest.fixture
def one() -> dict[str, Any]:
    """A made-up run on one GPU."""
    point = Point(65536)
    verified = {"name": OURS, "pass": 26, "worst": 0.762, "verdict": "pass"}
    largest = {"name": OURS, "n": 1, "b": 4194304, "d": 512, "status": "measured", "forward_ms": 35e3}
    largest |= {"backward_ms": 94e3, "fraction": 0.816, "peak_bytes": 24 << 30, "d_image": 0.0023, "d_text": 0.0022}
    times = [
        timed("steps", OURS, point, 30.0, peak_bytes=900 * MIB),
        timed("steps", "contrastile cupy", point, 25.0),
        timed("steps", OURS, Point(65536, scale=400.0), 60.0),
        timed("steps", OURS, Point(65536, what="forward"), 9.0),
        timed("peers", OURS, point, 30.0, peak_bytes=900 * MIB),
        timed("peers", OPEN_CLIP, point, 90.0, peak_bytes=9000 * MIB),
        timed("peers", INF_CL, point, 1.0) | {"status": "skip", "reason": "no module"},
        timed("peers", OURS, Point(8192), 2.0),
    ]
    return made_up(times, verify=[verified], big=[largest, {"name": OURS, "status": "skip", "reason": "no time"}])


@pytest.fixture
def four() -> dict[str, Any]:
    """A made-up run on four GPUs."""
    weak, strong = Point(32768, each=True), Point(262144)
    times = [
        timed("steps", OURS, weak, 6.0),
        timed("steps", OURS, weak, 25.0, 4, "ring"),
        timed("steps", OURS, weak, 30.0, 4, "gather", peak_bytes=900 * MIB),
        timed("steps", OURS, strong, 480.0),
        timed("steps", OURS, strong, 250.0, 2, "ring"),
        timed("steps", OURS, strong, 150.0, 4, "ring"),
        timed("steps", OURS, strong, 140.0, 4, "auto"),
        timed("peers", OURS, Point(65536), 8.0, 4, "auto"),
        timed("peers", OPEN_CLIP, Point(65536), 12.0, 4, ""),
        timed("peers", OPEN_CLIP, Point(65536, graph=True), 11.0, 4, ""),
    ]
    return made_up(times, 4)


def test_the_committed_pages_are_what_the_records_say() -> None:
    assert pages.main(["--check"]) == 0


def test_no_table_of_a_page_is_longer_than_a_screen() -> None:
    for name in pages.PAGES:
        blocks = (pages.ROOT / name).read_text(encoding="utf-8").split("\n\n")
        assert max(block.count("\n|") for block in blocks) <= 26, name


def test_a_page_that_says_something_else_is_found_out(
    tmp_path: Path, one: dict[str, Any], four: dict[str, Any]
) -> None:
    results, name = tmp_path / "results", "docs/benchmarks/gpu.md"
    results.mkdir()
    for path, data in (("gpu_some", one), ("gpu_some_x4", four)):
        (results / f"{path}.json").write_text(json.dumps(data), encoding="utf-8")
    for page in pages.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(
            f"before\n{pages.BEGIN}\nstale\n{pages.page_writing.END}\nafter\n", encoding="utf-8"
        )
    how = ["--results", str(results), "--root", str(tmp_path)]
    assert pages.main([*how, "--check"]) == 1
    assert pages.main(how) == 0
    assert pages.main([*how, "--check"]) == 0
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert "stale" not in text
    assert "### Some GPU" in text
    assert "### 4 x Some GPU" in (tmp_path / "docs/benchmarks/many-gpus.md").read_text(encoding="utf-8")
    (tmp_path / name).write_text(text.replace("4,194,304", "4,194,305"), encoding="utf-8")
    assert pages.main([*how, "--check"]) == 1
    assert pages.main(how) == 0
    chart = tmp_path / "docs" / "assets" / "home-light.svg"
    chart.write_text(chart.read_text(encoding="utf-8").replace("Some GPU", "Old GPU"), encoding="utf-8")
    assert pages.main([*how, "--check"]) == 1


def test_a_page_without_markers_or_records(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must hold"):
        pages.spliced("no markers", "text")
    empty = pages.performance({"run": {}}, pages.ROOT)
    assert "Nothing has been measured yet" in pages.spliced(f"{pages.BEGIN}{pages.page_writing.END}", empty)


def test_steps_stand_beside_each_other(one: dict[str, Any]) -> None:
    rows = tables.steps(one).splitlines()
    assert rows[0] == f"| b | d | scale | graph | {OURS} | contrastile cupy |"
    # 8 x 65536^2 x 512 / 30 ms / 700 TFLOP/s
    assert rows[2] == "| 65,536 | 512 | 100 | no | 30.0 ms, 83.8 %, 900.0 MiB | 25.0 ms, 100.5 % |"
    assert len(rows) == 4
    assert len(tables.steps(one, least=2).splitlines()) == 3


def test_peers_are_beside_the_limit(one: dict[str, Any], four: dict[str, Any]) -> None:
    text = tables.peers(one)
    # 8 x 65536^2 x 512 / 700 TFLOP/s
    assert "| *the limit, 8 b² d / ceiling* | 0.393 | 25.1 | 100 % | 0 |" in text
    assert f"| {OURS} | 2.00 | 30.0 | 83.8 % | 900.0 |" in text
    assert f"| {OPEN_CLIP} | - | 90.0 | 27.9 % | 9,000 |" in text
    assert INF_CL not in text
    text = tables.peers(four)
    assert "| *the limit, 8 b² d / 4 / ceiling* | 6.28 |" in text
    assert f"| {OURS}, auto | 8.00 |" in text
    assert f"| {OPEN_CLIP}, in a CUDA graph | 11.0 |" in text


def test_perfect_scaling_is_the_rate_of_a_rank_alone(four: dict[str, Any]) -> None:
    rows = tables.scaling(four).splitlines()[2:]
    assert rows[0].endswith("| 100.0 % |")
    # as many pairs on every rank: 4 x 6 / 25
    assert rows[1].endswith("| 96.0 % |")
    # one batch: 480 / (2 x 250), and by auto 480 / (4 x 140)
    assert rows[3].endswith("| 96.0 % |")
    assert rows[4].endswith("| 85.7 % |")
    assert "900.0 MiB" in rows[1]


def test_the_largest_batch_and_the_verdicts(one: dict[str, Any]) -> None:
    assert "| 4,194,304 | 512 | 35.0 | 94.0 | 81.6 % | 24.0 | 0.0023 | 0.0022 |" in tables.big(one)
    assert tables.verified(one) == f"Verified first, 26 checks of {OURS}: the largest error is 0.762 of its bound."


def test_the_chart_of_the_home_page_is_of_the_newest_record_of_one_gpu(
    one: dict[str, Any], four: dict[str, Any]
) -> None:
    old = one | {"environment": one["environment"] | {"date": "2025-01-02T03:04:05"}}
    ours_alone = made_up([timed("peers", OURS, Point(8192), 2.0)])
    ours_alone["environment"]["date"] = "2027-01-02T03:04:05"
    records = {"old": old, "one": one, "four": four, "ours": ours_alone}
    assert figures.newest(records) is one
    assert figures.newest({"four": four}) is None


def test_the_chart_of_the_home_page_shows_ours_the_formula_and_the_two_fastest_kernels(
    tmp_path: Path, one: dict[str, Any]
) -> None:
    for name, ms in (("liger-kernel x2", 75.0), (INF_CL, 900.0), ("cut-cross-entropy x2, exact", 180.0)):
        one["times"].append(timed("peers", name, Point(65536), ms, peak_bytes=400 * MIB))
    # faster, but replayed
    one["times"].append(timed("peers", "chunked PyTorch, compiled", Point(65536, graph=True), 1.0))
    figures.home(one, tmp_path)
    names = [f"home{which}-{theme}.svg" for which in ("", "-phone") for theme in ("light", "dark")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    first = {name: (tmp_path / name).read_text(encoding="utf-8") for name in names}
    for text in first.values():
        words = re.findall(r"<text[^>]*>([^<]*)</text>", text)
        wanted = {OURS, OPEN_CLIP, "liger-kernel x2", "cut-cross-entropy x2, exact", "8k", "64k", figures.told(one)}
        assert wanted <= set(words)
        assert not {INF_CL, "chunked PyTorch, compiled"} & set(words)
        assert "DejaVu" not in text
    figures.home(one, tmp_path)
    assert first == {name: (tmp_path / name).read_text(encoding="utf-8") for name in names}
